"""What a mask computes, read from the graph: every value it is made from becomes a formula of indices.

An abstract interpretation: sizes may be symbolic, inputs are unknown, and an operator that is not in the table makes
its result unknown. Values that depend on constants alone are evaluated and recognised instead.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from refold.graph.constants import Constants
from refold.graph.targets import name_of
from refold.graph.values import count_elements, example_value, proves_shapes
from refold.graph.view import GraphView
from refold.patterns.masks import elementwise, movement  # noqa: F401  (importing them fills RULES)
from refold.patterns.masks.formulas import Unknown, move_axes, recognise
from refold.patterns.masks.operands import LARGEST, RULES, Operands, Symbol, Value
from refold.rewrite.refusal import Refuse


class MaskFormulas:
    """Finds the formulas of masks; what was found for a value is kept for all masks that are made from it."""

    def __init__(self, view: GraphView) -> None:
        self._view = view
        self._sizes_hold = any(proves_shapes(t) for t in map(example_value, view.nodes) if t is not None)
        self._values: dict[Node, Any] = {}

    def of(self, mask: Node) -> Value | Unknown:
        """What a node computes."""
        for node in self._view.needed_for(mask, self._values):
            self._values[node] = self._understand(node)
        found = self._values[mask]
        return found if isinstance(found, Value | Unknown) else Unknown(f"{mask.name} is not a tensor")

    def _understand(self, node: Node) -> Any:
        if node.op == "placeholder":
            return Unknown(f"it depends on the values of the input {node.target}")
        if node in self._view.written:
            return Unknown(f"{self._view.written[node].name} writes into {node.name} in place")
        if node.op == "call_module":
            return Unknown(f"it depends on what the module {node.target} computes")
        found = self._by_rule(node)
        if isinstance(found, Unknown):
            return self._by_value(node) or found
        return found

    def _by_rule(self, node: Node) -> Any:
        if node.op == "get_attr":
            return Unknown(f"it depends on {node.target}, which training or a checkpoint can change")
        number = _size(node, self._sizes_hold)
        if number is not None:
            return number
        apply = RULES.of(node)
        operands = self._operands(node)
        blocked = next((a for a in _leaves(operands) if isinstance(a, Unknown)), None)
        if apply is None:
            return blocked or Unknown(f"{name_of(node)} is not understood as part of a mask")
        if blocked is not None and name_of(node) not in _MAY_HIDE:
            return blocked
        try:
            return _as_recorded(apply(operands), operands.recorded)
        except Refuse as refusal:
            return Unknown(refusal.reason)
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, ArithmeticError):
            return blocked or Unknown(f"the arguments of {node.name} are not understood")

    def _operands(self, node: Node) -> Operands:
        def fill(value: Any) -> Any:
            return self._values[value] if isinstance(value, Node) else value

        args: Any = node.args
        if node.op == "call_method" and node.target == "where" and len(args) > 1:  # x.where(condition, other)
            args = (args[1], args[0], *args[2:])
        kwargs = dict(map_aggregate(node.kwargs, fill))
        return Operands(name_of(node), map_aggregate(args, fill), kwargs, example_value(node))

    def _by_value(self, node: Node) -> Value | None:
        recorded, constants = example_value(node), self._view.analysis(Constants)
        if node not in constants.nodes or (recorded is not None and count_elements(recorded) > LARGEST):
            return None
        value = constants.value(node)
        if not isinstance(value, torch.Tensor) or value.is_meta or value.numel() > LARGEST:
            return None
        element = recognise(value)
        return None if isinstance(element, Unknown) else Value(value.dtype, tuple(value.shape), element)


_MAY_HIDE = {"where", "__and__", "bitwise_and", "logical_and", "__or__", "bitwise_or", "logical_or"}


def _leaves(operands: Operands) -> list[Any]:
    found: list[Any] = []
    map_aggregate((operands.args, operands.kwargs), lambda value: found.append(value))
    return found


def _size(node: Node, sizes_hold: bool) -> Any:
    """A node that is a number or a device; None for everything else."""
    value = node.meta.get("val")
    if isinstance(value, bool | int | float):
        return value if sizes_hold else Symbol()
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return Symbol(str(value))
    if node.op == "call_function" and node.target is getattr:
        return Symbol()
    return Symbol() if name_of(node) in ("size", "sym_size", "dim") else None


def _as_recorded(value: Any, recorded: torch.Tensor | None) -> Any:
    """A value as a rule made it, if capture recorded such a one. Axes of size 1 have the index 0, which is left out."""
    if not isinstance(value, Value):
        return value
    if recorded is not None and (recorded.dtype, recorded.dim()) != (value.dtype, value.rank):
        raise Refuse(f"it was captured as {recorded.dtype} with {recorded.dim()} dimensions, which is not understood")
    ones = {i - value.rank: None for i, size in enumerate(value.shape) if size == 1}
    return replace(value, element=move_axes(value.element, ones)) if ones else value
