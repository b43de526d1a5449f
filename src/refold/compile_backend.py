"""`torch.compile(model, backend="refold")`: rewrite the graph that dynamo captured, then hand it over to inductor.

Dynamo hands weights over as inputs of the graph. Without gradients they are bound to the graph as parameters, so that
rewrites of weights apply; with gradients only rewrites that touch no weights are made. The rewrites are those of
`refold.optimize`, without its verification and measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from refold import fx_private
from refold.errors import RefoldError
from refold.explaining import hollow_copy
from refold.history import history
from refold.optimizing.pipeline import default_pipeline
from refold.rewrite import Rewrite
from refold.transformation import Transformation
from refold.weights import Concatenate


def refold_backend(gm: GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """The backend: found by torch.compile through its entry point."""
    inputs = list(example_inputs)
    trains = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
    if trains:
        rewritten = _rewrite(hollow_copy(gm), weights=False)
        return _inductor(rewritten, inputs, options)
    bound, free = _bind_weights(hollow_copy(gm), inputs)
    rewritten = _rewrite(bound, weights=True)
    compiled = _inductor(rewritten, [inputs[i] for i in free], options)
    weights = [x for i, x in enumerate(inputs) if i not in set(free)]
    if _shares_memory(rewritten):
        return lambda *args: compiled(*(args[i] for i in free))
    return _Watched(compiled, free, weights, lambda: _inductor(gm, inputs, options))


def _inductor(gm: GraphModule, inputs: list[Any], options: dict[str, Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(gm, inputs, **options)
    return compiled


class _Watched:
    """Runs the rewritten graph while the weights it was made from are unchanged, and the original one afterwards."""

    def __init__(
        self, fast: Callable[..., Any], free: list[int], weights: list[Any], original: Callable[[], Callable[..., Any]]
    ) -> None:
        self.fast, self.free, self.weights, self.make_original = fast, free, weights, original
        self.versions = self._versions()
        self.original: Callable[..., Any] | None = None

    def _versions(self) -> list[int | None]:
        return [fx_private.version_of(weight) for weight in self.weights]

    def __call__(self, *args: Any) -> Any:
        if self.original is None and self._versions() == self.versions:
            return self.fast(*(args[i] for i in self.free))
        self.original = self.original or self.make_original()
        return self.original(*args)


def _bind_weights(gm: GraphModule, inputs: list[Any]) -> tuple[GraphModule, list[int]]:
    """Turn inputs that are a model's parameters or buffers into attributes of the graph; the places of the others."""
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    free: list[int] = []
    for i, (node, value) in enumerate(zip(placeholders, inputs, strict=True)):
        if not _is_weight(node, value):
            free.append(i)
            continue
        name = f"weight_{i}"
        tensor = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)
        if value.is_floating_point():
            gm.register_parameter(name, tensor)
        else:
            gm.register_buffer(name, value)
        with gm.graph.inserting_before(node):
            fetch = gm.graph.get_attr(name)
        fetch.meta = dict(node.meta)
        node.replace_all_uses_with(fetch)
        gm.graph.erase_node(node)
    gm.recompile()
    return gm, free


def _is_weight(node: Node, value: Any) -> bool:
    """Dynamo names inputs after where they come from: attributes of modules say so."""
    if not isinstance(value, torch.Tensor) or not node.users:
        return False
    return isinstance(value, nn.Parameter) or "_parameters_" in node.name or "_buffers_" in node.name


def _rewrite(gm: GraphModule, *, weights: bool) -> GraphModule:
    for transformation in default_pipeline():
        if weights or _touches_no_weights(transformation):
            try:
                transformation(gm)
            except RefoldError:
                continue  # the graph is as it was before; inductor takes it as it is
    return gm


def _touches_no_weights(transformation: Transformation) -> bool:
    return isinstance(transformation, Rewrite) and transformation.kind == "graph"


def _shares_memory(gm: GraphModule) -> bool:
    """Whether weights written in place are seen by the rewritten graph: merged ones are views of the merged memory."""
    records = [record for change in history(gm) for record in change.maps]
    return all(isinstance(record.map.operation, Concatenate) for record in records)
