"""What a mask computes, read from the graph: every value it is made from becomes a formula of indices.

An abstract interpretation: sizes may be symbolic, inputs are unknown, and an operator that is not in the table makes
its result unknown. Values that depend on constants alone are evaluated and recognised instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from refold.constants import Constants
from refold.index_expressions import Element, Unknown, recognise
from refold.match import GraphView, example_value, proves_shapes
from refold.purity import name_of

Size = int | str | None
"""A number, the name of a symbolic size, or unknown."""

_LARGEST = 1 << 26
"""Constants with more elements are not looked at."""


@dataclass(frozen=True)
class Value:
    """A tensor: its dtype, its sizes as far as known, and its elements as a formula of indices."""

    dtype: torch.dtype
    shape: tuple[Size, ...]
    element: Element

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def axis(self, dim: int) -> int:
        """An axis, counted from the right."""
        return dim if dim < 0 else dim - self.rank


@dataclass(frozen=True)
class Operands:
    """The arguments of a call with their values in the place of nodes."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    noted: torch.Tensor | None

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by its place or name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


class NotUnderstood(Exception):
    """Why a value is not understood, as a sentence."""


Rule = Callable[[Operands], Value]
RULES: dict[str, Rule] = {}
"""The rule for each operator, by its bare name."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a rule into the table."""

    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return enter


class Analysis:
    """Understands the values that some nodes are made from, in one pass over them."""

    def __init__(self, view: GraphView, wanted: Iterable[Node]) -> None:
        import refold.mask_rules
        import refold.mask_shape_rules  # noqa: F401  they fill the table

        self.gm: GraphModule = view.gm
        self._constants = Constants(view)
        self._written = all_written(view)
        self._sizes_hold = any(proves_shapes(t) for t in map(example_value, view.nodes) if t is not None)
        self._values: dict[Node, Any] = {}
        for node in sorted(_ancestors(wanted), key=view.position.__getitem__):
            self._values[node] = self._understand(node)

    def of(self, node: Node) -> Value | Unknown:
        """What a node computes."""
        found = self._values.get(node)
        return found if isinstance(found, Value | Unknown) else Unknown(f"{node.name} is not a tensor")

    def _understand(self, node: Node) -> Any:
        if node.op == "placeholder":
            return Unknown(f"it depends on the values of the input {node.target}")
        if node in self._written:
            return Unknown(f"{self._written[node].name} writes into {node.name} in place")
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
        apply = RULES.get(name_of(node))
        operands = self._operands(node)
        blocked = next((a for a in _tensors(operands) if isinstance(a, Unknown)), None)
        if apply is None:
            return blocked or Unknown(f"{name_of(node)} is not understood as part of a mask")
        if blocked is not None and name_of(node) not in _MAY_HIDE:
            return blocked
        try:
            return _as_noted(apply(operands), operands.noted)
        except NotUnderstood as reason:
            return Unknown(str(reason))
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, ArithmeticError):
            return blocked or Unknown(f"the arguments of {node.name} are not understood")

    def _operands(self, node: Node) -> Operands:
        def fill(value: Any) -> Any:
            return self._values[value] if isinstance(value, Node) else value

        args: Any = node.args
        if node.op == "call_method" and node.target == "where" and len(args) > 1:  # x.where(condition, other)
            args = (args[1], args[0], *args[2:])
        return Operands(map_aggregate(args, fill), dict(map_aggregate(node.kwargs, fill)), example_value(node))

    def _by_value(self, node: Node) -> Value | None:
        noted = example_value(node)
        if node not in self._constants.nodes or (noted is not None and _is_large(noted)):
            return None
        value = self._constants.value(node)
        if not isinstance(value, torch.Tensor) or value.is_meta or value.numel() > _LARGEST:
            return None
        element = recognise(value)
        return None if isinstance(element, Unknown) else Value(value.dtype, tuple(value.shape), element)


_MAY_HIDE = {"where", "__and__", "bitwise_and", "logical_and", "__or__", "bitwise_or", "logical_or"}


def _tensors(operands: Operands) -> list[Any]:
    found: list[Any] = []
    map_aggregate((operands.args, operands.kwargs), lambda value: found.append(value))
    return found


def _is_large(noted: torch.Tensor) -> bool:
    sizes = [s for s in noted.shape if isinstance(s, int)]
    return len(sizes) == noted.dim() and torch.Size(sizes).numel() > _LARGEST


def all_written(view: GraphView) -> dict[Node, Node]:
    """Every value that may be written into, with who writes."""
    from refold.aliasing import memory_roots, written_by

    found: dict[Node, Node] = {}
    for place in view.writers:
        writer = view.nodes[place]
        for target in written_by(view.gm, writer):
            for node in (writer, *memory_roots(view.gm, target)):
                found.setdefault(node, writer)
    return found


def _ancestors(wanted: Iterable[Node]) -> set[Node]:
    pending = list(wanted)
    seen: set[Node] = set(pending)
    while pending:
        for n in pending.pop().all_input_nodes:
            if n not in seen:
                seen.add(n)
                pending.append(n)
    return seen


@dataclass(frozen=True)
class Symbol:
    """A number that is not known here: a symbolic size, with its name, or a device."""

    name: str | None = None


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


def _as_noted(value: Any, noted: torch.Tensor | None) -> Any:
    """A value as a rule made it, if capture saw such a one. Axes of size 1 have the index 0, which is left out."""
    from refold.index_expressions import move_axes

    if not isinstance(value, Value):
        return value
    if noted is not None and (noted.dtype, noted.dim()) != (value.dtype, value.rank):
        raise NotUnderstood(f"it was captured as {noted.dtype} with {noted.dim()} dimensions, which is not understood")
    ones = {i - value.rank: None for i, size in enumerate(value.shape) if size == 1}
    return replace(value, element=move_axes(value.element, ones)) if ones else value


def noted_shape(noted: torch.Tensor) -> tuple[Size, ...]:
    """The sizes that capture noted: numbers, or the names of symbolic ones; unknown where they hold for one run."""
    if not proves_shapes(noted):
        return (None,) * noted.dim()
    return tuple(size if isinstance(size, int) else str(size) for size in noted.shape)
