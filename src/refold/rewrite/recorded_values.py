"""What capture would have recorded about a node that a rewrite makes: its value, computed from the recorded values of
its inputs without data, and the place in the model and in its source that it stems from."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from refold import fx_private
from refold.fx_private import find_tensor
from refold.graph.values import example_value

PLACE = ("nn_module_stack", "stack_trace")
"""What is recorded of where in the model a node stems from."""


class _Unknown(Exception):
    """An input has no recorded value."""


class RecordedValues:
    """Records values on the nodes of a graph that has some: fake tensors, or tensors of the device `meta`."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm

    @cached_property
    def _sample(self) -> torch.Tensor | None:
        return _first_without_data(self.gm.graph)

    def record(self, node: Node) -> None:
        """Record the value of a node, where those of its inputs are recorded."""
        if self._sample is None:
            return
        sizes = getattr(getattr(self._sample, "fake_mode", None), "shape_env", None)
        # as a decorator: a fault in a `with` of our own could leave guards switched off
        compute = self._compute if sizes is None else sizes.suppress_guards()(self._compute)
        try:
            node.meta["val"] = compute(node)
        except Exception:  # whatever cannot be computed without data is not recorded
            return

    def _compute(self, node: Node) -> Any:
        if node.op == "get_attr":
            return self._tensor_like(find_tensor(self.gm, str(node.target)))
        args, kwargs = map_arg((node.args, node.kwargs), _value_of)
        if node.op == "call_method":
            function = getattr(args[0], str(node.target))
            value = function(*args[1:], **kwargs)
        else:
            called = self._without_data(str(node.target)) if node.op == "call_module" else node.target
            value = called(*args, **kwargs)  # type: ignore[operator]
        return value.detach() if isinstance(value, torch.Tensor) else value

    def _without_data(self, path: str) -> nn.Module:
        """A layer like the one at a path, on tensors without data."""
        module = self.gm.get_submodule(path)
        layer = fx_private.module_like(type(module), fx_private.with_own_containers(vars(module)))
        for name in ("_parameters", "_buffers"):
            tensors = fx_private.table(layer, name)
            tensors.update({key: self._tensor_like(value) for key, value in tensors.items() if value is not None})
        if fx_private.table(layer, "_modules") or fx_private.has_hooks(layer):
            raise _Unknown  # more than a layer
        return layer

    def _tensor_like(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """A tensor of the same kind without data. (One that is made from it would keep it alive.)"""
        if tensor is None or self._sample is None:
            raise _Unknown
        of_sample = _is_meta(self._sample) or tensor.is_meta  # weights that are not there yet lie where the inputs do
        device = self._sample.device if of_sample else tensor.device
        empty = self._sample.new_empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return empty.requires_grad_(tensor.requires_grad)


def copy_place(source: Node, node: Node) -> None:
    """Let a node stem from the same place of the model as another one, where nothing is known of its own."""
    for key in PLACE:
        if key in source.meta:
            node.meta.setdefault(key, source.meta[key])


def _first_without_data(graph: Graph) -> torch.Tensor | None:
    values = (example_value(node) for node in graph.nodes)
    recorded = next((value for value in values if value is not None), None)
    return recorded if recorded is not None and (_is_meta(recorded) or hasattr(recorded, "fake_mode")) else None


def _is_meta(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta"


def _value_of(node: Node) -> Any:
    if "val" in node.meta:
        return node.meta["val"]
    if "example_value" in node.meta:
        return node.meta["example_value"]
    if node.op == "call_function" and node.target is getattr:  # of which capture records nothing: a device, a dtype
        return getattr(_value_of(node.args[0]), str(node.args[1]))  # type: ignore[arg-type]
    raise _Unknown
