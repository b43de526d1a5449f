"""Which values of a graph are the same in every run, and what they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from refold import fx_private
from refold.aliasing import written_memory
from refold.match import GraphView, example_value
from refold.purity import is_pure, name_of

_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What operators raise where they do not take their operands."""


class Constants:
    """The nodes of a graph that depend on no input and on no weight; each is evaluated when it is first asked for.

    Sources are numbers, tensors made from them (`arange`, `full`), and buffers that no checkpoint holds. With
    `parameters`, parameters and buffers of the checkpoint count as constant too.
    """

    def __init__(self, view: GraphView, *, parameters: bool = False) -> None:
        self.gm = view.gm
        self._parameters = parameters
        self._written = written_memory(view.gm, view.nodes)
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
                self.nodes.add(node)
                self.weighted |= {node} if self._is_weighted(node) else set()

    def _is_constant(self, node: Node) -> bool:
        if node in self._written:
            return False
        if node.op == "get_attr":
            return self._constant_attribute(str(node.target), parameters=self._parameters)
        if is_device_of_input(node):
            return True
        if node.op not in ("call_function", "call_method", "call_module") or not is_pure(self.gm, node):
            return False
        if node.op == "call_module" and not self._constant_module(str(node.target), parameters=self._parameters):
            return False
        return all(n in self.nodes for n in node.all_input_nodes)

    def _is_weighted(self, node: Node) -> bool:
        if not self._parameters or is_device_of_input(node):
            return False
        own = (node.op == "get_attr" and not self._constant_attribute(str(node.target), parameters=False)) or (
            node.op == "call_module" and not self._constant_module(str(node.target), parameters=False)
        )
        return own or any(n in self.weighted for n in node.all_input_nodes)

    def _constant_module(self, path: str, *, parameters: bool) -> bool:
        module = self.gm.get_submodule(path)
        return parameters or not any(True for _ in (*module.parameters(), *module.buffers()))

    def _constant_attribute(self, target: str, *, parameters: bool) -> bool:
        path, _, key = target.rpartition(".")
        try:
            owner = self.gm.get_submodule(path)
        except AttributeError:
            return False
        if isinstance(owner, torch.jit.ScriptModule):
            return False
        if key in fx_private.table(owner, "_buffers"):
            return parameters or key in fx_private.plain_attributes(owner)["_non_persistent_buffers_set"]
        if key in fx_private.table(owner, "_parameters"):
            return parameters
        return isinstance(getattr(owner, key, None), torch.Tensor | int | float | bool | torch.dtype)

    def value(self, node: Node) -> Any:
        """What a constant node computes; None if it cannot be computed here."""
        if node not in self.nodes:
            return None
        order = self._needed(node)
        for n in order:
            if any(i in self._failed for i in n.all_input_nodes):
                self._failed.add(n)
                continue
            try:
                with torch.no_grad():
                    self._values[n] = self._run(n)
            except _REFUSALS:  # what an operator does not take here stays in the graph as it is
                self._failed.add(n)
        return self._values.get(node)

    def _needed(self, node: Node) -> list[Node]:
        """The nodes still to be evaluated for this one, inputs first."""
        order: list[Node] = []
        pending: list[tuple[Node, bool]] = [(node, False)]
        seen: set[Node] = set()
        while pending:
            current, ready = pending.pop()
            if ready:
                order.append(current)
            elif current not in seen and current not in self._values and current not in self._failed:
                seen.add(current)
                pending.append((current, True))
                pending += [(n, False) for n in current.all_input_nodes if not is_device_of_input(current)]
        return order

    def _run(self, node: Node) -> Any:
        return _device_of(self.gm, node) if is_device_of_input(node) else run_node(self.gm, node, self._values)


def run_node(gm: GraphModule, node: Node, values: Mapping[Node, Any]) -> Any:
    """What a node gives, from the values of those that it reads."""

    def fill(value: Any) -> Any:
        return values[value] if isinstance(value, Node) else value

    args, kwargs = map_aggregate(node.args, fill), map_aggregate(node.kwargs, fill)
    if node.op == "get_attr":
        return fetch(gm, str(node.target))
    if node.op == "call_module":
        return gm.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def is_device_of_input(node: Node) -> bool:
    """Whether a node asks for the device of a value: the module's own, whatever the value."""
    return node.op == "call_function" and node.target is getattr and node.args[1:2] == ("device",)


def _device_of(gm: GraphModule, node: Node) -> torch.device:
    """Where the module's tensors are; where it has none, where capture saw the input."""
    first = next((t for t in (*gm.parameters(), *gm.buffers())), None)
    if first is not None:
        return first.device
    noted = example_value(node.args[0])
    return noted.device if noted is not None else torch.device("cpu")


def fetch(gm: nn.Module, target: str) -> Any:
    """The attribute of a full name."""
    path, _, key = target.rpartition(".")
    return getattr(gm.get_submodule(path), key)


def describes(node: Node) -> str:
    """A short name for a node in a sentence."""
    return f"{node.name} ({name_of(node)})" if node.op != "placeholder" else f"the input {node.name}"
