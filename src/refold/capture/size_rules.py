"""Which inputs a captured graph takes: dtype, rank, fixed sizes, open sizes and how they depend on each other."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import CodeType
from typing import Any

import torch

from refold.capture.export_program import Exported
from refold.capture.guard_lines import conditions_of

_SIZE = re.compile(r"L\['leaves'\]\[(\d+)\]\.size\(\)\[(\d+)\]")
_LAST_SIZE = 2**31
_ANY = (0, _LAST_SIZE)

Dim = tuple[int, int]
"""A dimension of an input: the index of the input, and its own."""


@dataclasses.dataclass(frozen=True)
class InputRule:
    """One tensor input: its name, dtype and sizes; an open size is the name of its symbol."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int | str, ...]
    example: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Condition:
    """What must hold of the sizes ``d[input][dimension]``, and the line of the model that relies on it."""

    code: str
    line: str

    def holds(self, sizes: Sequence[Sequence[int]]) -> bool:
        try:
            return bool(eval(_compiled(self.code), {"d": sizes, **_WORDS}))
        except Exception:  # a condition in words this file does not know is none: the graph's own ops will complain
            return True


_WORDS = {"math": math, "min": min, "max": max, "__builtins__": {}}


@cache
def _compiled(code: str) -> CodeType:
    return compile(code, "<condition>", "eval")


@dataclasses.dataclass(frozen=True)
class SizeRules:
    """All tensor inputs, the range of each open size, and conditions over sizes. ``reasons`` says, of dimensions that
    capture itself fixed or narrowed, why."""

    inputs: tuple[InputRule, ...]
    ranges: Mapping[str, tuple[int, int]]
    conditions: tuple[Condition, ...]
    closed: str
    """Why sizes are fixed that were not left open."""
    reasons: Mapping[Dim, str] = dataclasses.field(default_factory=dict)

    def complaint(self, tensors: Sequence[torch.Tensor], any_float: bool = False) -> str:
        """Why these tensors cannot be taken, as a sentence; empty where they can."""
        for rule, tensor in zip(self.inputs, tensors, strict=True):
            why = _misfit(rule, tensor, any_float)
            if why:
                return why
        sizes = [tuple(tensor.shape) for tensor in tensors]
        return self._wrong_fixed_size(sizes) or self._wrong_open_size(sizes) or self._broken_condition(sizes)

    def _sizes(self, sizes: Sequence[Sequence[int]]) -> Iterator[tuple[Dim, int | str, int, str]]:
        """Every size: where, what the rules say, how large it is, and that as words."""
        for i, (rule, shape) in enumerate(zip(self.inputs, sizes, strict=True)):
            for dim, (wanted, size) in enumerate(zip(rule.sizes, shape, strict=True)):
                yield (i, dim), wanted, size, f"{rule.name} has size {size} in dimension {dim}"

    def _wrong_fixed_size(self, sizes: Sequence[Sequence[int]]) -> str:
        for place, wanted, size, here in self._sizes(sizes):
            if isinstance(wanted, int) and wanted != size:
                why = self._because(place, sizes) or f": {self.closed}"
                return f"{here}, but the graph was captured for size {wanted} only{why}"
        return ""

    def _wrong_open_size(self, sizes: Sequence[Sequence[int]]) -> str:
        seen: dict[str, tuple[int, str]] = {}
        for place, symbol, size, here in self._sizes(sizes):
            if isinstance(symbol, int):
                continue
            first, there = seen.setdefault(symbol, (size, here))
            if first != size:
                return f"{there} but {here}; the graph was captured for equal sizes there"
            low, high = self.ranges.get(symbol, _ANY)
            if not low <= size <= high:
                return f"{here}, but the graph takes {_range(low, high)} there{self._because(place, sizes)}"
        return ""

    def _broken_condition(self, sizes: Sequence[Sequence[int]]) -> str:
        for condition in self.conditions:
            if not condition.holds(sizes):
                shown = ", ".join(f"{rule.name}: {size}" for rule, size in zip(self.inputs, sizes, strict=True))
                where = f" ({condition.line})" if condition.line else ""
                return f"the sizes {shown} break the condition {self._named(condition)}{where}"
        return ""

    def _because(self, place: Dim, sizes: Sequence[Sequence[int]]) -> str:
        """Why a dimension has a rule that these sizes break: what capture found, or the line of the model."""
        if place in self.reasons:
            return f": {self.reasons[place]}"
        about = (c for c in self.conditions if f"d[{place[0]}][{place[1]}]" in c.code and c.line)
        line = next((c.line for c in about if not c.holds(sizes)), "")
        return f" ({line})" if line else ""

    def _named(self, condition: Condition) -> str:
        def name(found: re.Match[str]) -> str:
            return f"{self.inputs[int(found[1])].name}.shape[{found[2]}]"

        return re.sub(r"d\[(\d+)\]\[(\d+)\]", name, condition.code)

    def described(self) -> list[str]:
        """What is fixed or narrowed although it was left open, and why, as sentences."""
        found: dict[str, list[str]] = {}
        for place, wanted, size, _ in self._sizes([rule.example for rule in self.inputs]):
            low, high = (size, size) if isinstance(wanted, int) else self.ranges.get(wanted, _ANY)
            same = [place] if isinstance(wanted, int) else self.places({wanted})
            why = self._because(place, self._example_with(same, low - 1 if low else high + 1))
            if why or (isinstance(wanted, str) and (low, high) != _ANY):
                name = f"{self.inputs[place[0]].name}.shape[{place[1]}]"
                found.setdefault(f"{_range(low, high)}{why}", []).append(name)
        return [f"{' and '.join(names)}: {what}" for what, names in found.items()]

    def _example_with(self, places: Sequence[Dim], size: int) -> list[list[int]]:
        """The sizes of the example, but for one size at these places."""
        sizes = [list(rule.example) for rule in self.inputs]
        for i, dim in places:
            sizes[i][dim] = size
        return sizes

    def that_allow(self, tensors: Sequence[torch.Tensor]) -> SizeRules:
        """The same without ranges and conditions that these tensors break: they will be compared and so are known."""
        sizes = [tuple(t.shape) for t in tensors]
        ranges = dict(self.ranges)
        for _, symbol, size, _ in self._sizes(sizes):
            if isinstance(symbol, str):
                low, high = ranges.get(symbol, _ANY)
                ranges[symbol] = (min(low, size), max(high, size))
        conditions = tuple(c for c in self.conditions if c.holds(sizes))
        return dataclasses.replace(self, ranges=ranges, conditions=conditions)

    def open_dims(self) -> dict[str, tuple[int, ...]]:
        """The open dimensions of each input."""
        return {r.name: tuple(d for d, s in enumerate(r.sizes) if isinstance(s, str)) for r in self.inputs}

    def places(self, symbols: set[str]) -> list[Dim]:
        """The dimensions whose sizes are these symbols."""
        return [(i, d) for i, rule in enumerate(self.inputs) for d, size in enumerate(rule.sizes) if size in symbols]

    def fixed(self, symbols: set[str], why: str) -> SizeRules:
        """The same with these open sizes fixed to those of the example."""
        inputs = tuple(
            dataclasses.replace(
                rule,
                sizes=tuple(e if s in symbols else s for s, e in zip(rule.sizes, rule.example, strict=True)),
            )
            for rule in self.inputs
        )
        reasons = {**self.reasons, **dict.fromkeys(self.places(symbols), why)}
        return dataclasses.replace(self, inputs=inputs, reasons=reasons)

    def from_size(self, symbols: set[str], low: int, why: str) -> SizeRules:
        """The same where these open sizes are at least so large."""
        ranges = dict(self.ranges) | {s: (low, self.ranges.get(s, _ANY)[1]) for s in symbols}
        reasons = {**self.reasons, **dict.fromkeys(self.places(symbols), why)}
        return dataclasses.replace(self, ranges=ranges, reasons=reasons)


def _range(low: int, high: int) -> str:
    if low == high:
        return f"{low} only"
    return f"{low} to {high}" if high < _LAST_SIZE else f"{low} or more"


def _misfit(rule: InputRule, tensor: Any, any_float: bool) -> str:
    """What else than its sizes is wrong with an input."""
    if not isinstance(tensor, torch.Tensor):
        return f"{rule.name} must be a tensor, but is a {type(tensor).__name__}"
    both_float = any_float and rule.dtype.is_floating_point and tensor.dtype.is_floating_point
    if tensor.dtype != rule.dtype and not both_float:
        return f"{rule.name} has dtype {tensor.dtype}, but the graph was captured with {rule.dtype}"
    if tensor.dim() != len(rule.sizes):
        return f"{rule.name} has {tensor.dim()} dimensions, but the graph was captured with {len(rule.sizes)}"
    return ""


def rules_of(exported: Exported, names: Sequence[str], leaves: Sequence[torch.Tensor], closed: str) -> SizeRules:
    """Read the rules from the symbolic sizes of an exported program's inputs; ``closed`` says why others are fixed."""
    wanted = set(exported.program.graph_signature.user_inputs)
    values = [n.meta["val"] for n in exported.program.graph.find_nodes(op="placeholder") if n.name in wanted]
    ranges = {str(s): (_bound(r.lower), _bound(r.upper)) for s, r in exported.program.range_constraints.items()}

    def size_of(size: Any) -> int | str:
        low, high = ranges.get(str(size), _ANY)
        return size if isinstance(size, int) else low if low == high else str(size)

    inputs = tuple(
        InputRule(name, leaf.dtype, tuple(map(size_of, value.shape)), tuple(leaf.shape))
        for name, leaf, value in zip(names, leaves, values, strict=True)
    )
    conditions = (Condition(_SIZE.sub(r"d[\1][\2]", code), line) for code, line in conditions_of(values))
    return SizeRules(inputs, ranges, tuple(c for c in conditions if "d[" in c.code and "L[" not in c.code), closed)


def _bound(value: Any) -> int:
    """A bound that may be infinite, as a size."""
    return int(max(0, min(value, _LAST_SIZE)))
