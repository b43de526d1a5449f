"""Which values of a graph are the same in every run, and what they are."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from refold import fx_private
from refold.graph.aliasing import tensors_of_node
from refold.graph.purity import is_pure
from refold.graph.targets import find_module
from refold.graph.values import example_value
from refold.graph.view import GraphView

_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What operators raise where they do not take their operands."""


class Constants:
    """The nodes of a graph that depend on no input and on no weight; each is evaluated when its value is first needed.

    Sources are numbers, tensors made from them (`arange`, `full`), and buffers that no checkpoint holds. With
    `parameters`, parameters and buffers of the checkpoint count as constant too.
    """

    def __init__(self, view: GraphView, *, parameters: bool = False) -> None:
        self.gm = view.gm
        self._view = view
        self._parameters = parameters
        self._values: dict[Node, Any] = {}
        self._failed: set[Node] = set()
        self.nodes: set[Node] = set()
        self.weighted: set[Node] = set()
        """Those that depend on a parameter or on a buffer of the checkpoint."""
        casting: set[Node] = set()
        for node in view.nodes:
            if getattr(node.target, "__name__", "") == "_enter_autocast" and node.args[2:3] != (False,):
                casting.add(node)
            casting -= set(node.all_input_nodes)  # autocast is left by a call on what entered it
            if self._is_constant(node) and (not casting or node.op == "get_attr"):
                self._add(node)

    def _is_constant(self, node: Node) -> bool:
        if node in self._view.written_memory:
            return False
        if is_device_of_input(node):
            return True
        if not is_pure(self.gm, node) or (node.op == "get_attr" and not _fetches_plain_value(self.gm, node)):
            return False
        if not self._parameters and _reads_weights(self.gm, node):
            return False
        return all(n in self.nodes for n in node.all_input_nodes)

    def _add(self, node: Node) -> None:
        self.nodes.add(node)
        from_weights = _reads_weights(self.gm, node) or not self.weighted.isdisjoint(node.all_input_nodes)
        if from_weights and not is_device_of_input(node):
            self.weighted.add(node)

    def weights_of(self, node: Node) -> list[str]:
        """The names of the weights that a constant is made from."""
        if node not in self.weighted:
            return []
        makers = [n for n in self._view.needed_for(node, (), is_device_of_input) if _reads_weights(self.gm, n)]
        found = {id(tensor) for n in makers for tensor in tensors_of_node(self.gm, n)}
        return [name for name, tensor in fx_private.named_tensors(self.gm).items() if id(tensor) in found]

    def value(self, node: Node) -> Any:
        """What a constant node computes; None if it cannot be computed here."""
        if node not in self.nodes:
            return None
        for n in self._view.needed_for(node, self._values.keys() | self._failed, is_device_of_input):
            try:
                with torch.no_grad():
                    is_device = is_device_of_input(n)
                    self._values[n] = _device_of(self.gm, n) if is_device else run_node(self.gm, n, self._values)
            except _REFUSALS:  # what an operator does not take here, or reads such a value, stays in the graph as it is
                self._failed.add(n)
        return self._values.get(node)


def run_node(gm: GraphModule, node: Node, values: Mapping[Node, Any]) -> Any:
    """What a node gives, from the values of those that it reads."""

    def fill(value: Any) -> Any:
        return values[value] if isinstance(value, Node) else value

    args, kwargs = map_aggregate(node.args, fill), map_aggregate(node.kwargs, fill)
    if node.op == "get_attr":
        return attrgetter(str(node.target))(gm)
    if node.op == "call_module":
        return gm.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def is_device_of_input(node: Node) -> bool:
    """Whether a node gives the device of a value: the module's own, whatever the value."""
    return node.op == "call_function" and node.target is getattr and node.args[1:2] == ("device",)


def _device_of(gm: GraphModule, node: Node) -> torch.device:
    """Where the module's tensors are; where it has none, where the recorded input is."""
    first = next((t for t in (*gm.parameters(), *gm.buffers())), None)
    if first is not None:
        return first.device
    recorded = example_value(node.args[0])
    return recorded.device if recorded is not None else torch.device("cpu")


def _fetches_plain_value(gm: GraphModule, node: Node) -> bool:
    """Whether a get_attr gives a tensor or a number, not a module or an object."""
    path, _, key = str(node.target).rpartition(".")
    owner = find_module(gm, path)
    if owner is None or isinstance(owner, torch.jit.ScriptModule):
        return False
    return isinstance(getattr(owner, key, None), torch.Tensor | int | float | bool | torch.dtype)


def _reads_weights(gm: GraphModule, node: Node) -> bool:
    """Whether a node fetches a parameter or a buffer of the checkpoint, or calls a module that has tensors."""
    if node.op == "call_module":
        return bool(tensors_of_node(gm, node))
    if node.op != "get_attr":
        return False
    path, _, key = str(node.target).rpartition(".")
    owner = gm.get_submodule(path)
    if key in fx_private.table(owner, "_buffers"):
        return key not in fx_private.plain_attributes(owner)["_non_persistent_buffers_set"]
    return key in fx_private.table(owner, "_parameters")
