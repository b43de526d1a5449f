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

from refold.errors import RefoldError
from refold.explaining import hollow_copy
from refold.optimizing.freshness import Freshness
from refold.optimizing.pipeline import default_pipeline
from refold.rewrite import Rewrite
from refold.transformation import Transformation


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
    freshness = Freshness(weights, rewritten, follows=True)
    return _Watched(compiled, free, freshness, lambda: _inductor(gm, inputs, options))


def _inductor(gm: GraphModule, inputs: list[Any], options: dict[str, Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(gm, inputs, **options)
    return compiled


class _Watched:
    """Runs the rewritten graph while it has the weights that the model has, and the original one afterwards."""

    def __init__(
        self,
        fast: Callable[..., Any],
        free: list[int],
        freshness: Freshness,
        original: Callable[[], Callable[..., Any]],
    ) -> None:
        self.fast, self.free, self.freshness, self.make_original = fast, free, freshness, original
        self.original: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self.original is None and self.freshness.is_fresh():
            return self.fast(*(args[i] for i in self.free))
        if self.original is None:
            self.original = self.make_original()
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
