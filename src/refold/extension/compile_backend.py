"""`torch.compile(model, backend="refold")`: rewrite the graph that dynamo captured, then hand it over to inductor.

Dynamo hands weights over as inputs of the graph. Without gradients they are bound to the graph as parameters, so that
rewrites of weights apply; with gradients only rewrites that touch no weights are made. The rewrites are those of
`refold.optimize`, without its verification and measurements.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from refold.errors import RefoldError
from refold.optimization.default_pipeline import default_pipeline
from refold.optimization.watch import Watch, moving_weights
from refold.record.copies import shared_copy
from refold.rewrite.rule import Rewrite


def refold_backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend: found by torch.compile through its entry point. Mode and options are inductor's, which gets them."""
    inputs, settings = list(example_inputs), _inductor_settings(mode, options)
    trains = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)
    if trains:
        rewritten = _rewrite(shared_copy(gm), weights=False)
        return _inductor(rewritten, inputs, settings)
    bound, free = _bind_weights(shared_copy(gm), inputs)
    with moving_weights([other.watch for other in _in_use]):  # other graphs of the same model may share them
        rewritten = _rewrite(bound, weights=True)
    compiled = _inductor(rewritten, [inputs[i] for i in free], settings)
    weights = [x for i, x in enumerate(inputs) if i not in set(free)]
    watch = Watch(weights, rewritten, reads_live_weights=True)
    return _Watched(compiled, free, watch, lambda: _inductor(gm, inputs, settings))


def _inductor_settings(mode: str | None, options: dict[str, Any] | None) -> dict[str, Any]:
    """What a mode and options mean to inductor, checked by torch as it checks them for its own backend."""
    return dict(torch._TorchCompileInductorWrapper(mode, options, None).config)


def _inductor(gm: GraphModule, inputs: list[Any], settings: dict[str, Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(gm, inputs, config_patches=settings)
    return compiled


class _Watched:
    """Runs the rewritten graph while it has the weights that the model has, and the original one afterwards."""

    def __init__(
        self,
        fast: Callable[..., Any],
        free: list[int],
        watch: Watch,
        original: Callable[[], Callable[..., Any]],
    ) -> None:
        self.fast, self.free, self.watch, self.make_original = fast, free, watch, original
        self.original: Callable[..., Any] | None = None
        _in_use.add(self)

    def __call__(self, *args: Any) -> Any:
        if self.original is None and self.watch.why_changed() is None:
            return self.fast(*(args[i] for i in self.free))
        if self.original is None:
            self.original = self.make_original()
        return self.original(*args)


_in_use: weakref.WeakSet[_Watched] = weakref.WeakSet()


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
        if weights or (isinstance(transformation, Rewrite) and transformation.kind == "graph"):
            with suppress(RefoldError):  # the graph is as it was before; inductor takes it as it is
                transformation(gm)
    return gm
