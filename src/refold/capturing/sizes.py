"""Which inputs a captured graph takes: dtype, rank, fixed sizes, open sizes and how they depend on each other."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from refold.capturing.export import Exported

_SIZE = re.compile(r"L\['leaves'\]\[(\d+)\]\.size\(\)\[(\d+)\]")
_LAST_SIZE = 2**31


@dataclasses.dataclass(frozen=True)
class InputRule:
    """One tensor input: its name, dtype and sizes; an open size is the name of its symbol."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int | str, ...]
    example: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SizeRules:
    """All tensor inputs, the range of each open size, and conditions over ``d[input][dimension]``."""

    inputs: tuple[InputRule, ...]
    ranges: dict[str, tuple[int, int]]
    conditions: tuple[str, ...]

    def complaint(self, tensors: Sequence[torch.Tensor], any_float: bool = False) -> str:
        """Why these tensors cannot be taken, as a sentence; empty where they can."""
        for rule, tensor in zip(self.inputs, tensors, strict=True):
            why = _misfit(rule, tensor, any_float)
            if why:
                return why
        return self._unequal(tensors) or self._out_of_range(tensors) or self._broken_condition(tensors)

    def _unequal(self, tensors: Sequence[torch.Tensor]) -> str:
        seen: dict[str, tuple[int, str]] = {}
        for rule, tensor in zip(self.inputs, tensors, strict=True):
            for dim, (symbol, size) in enumerate(zip(rule.sizes, tensor.shape, strict=True)):
                here = f"{rule.name} has size {size} in dimension {dim}"
                first = seen.setdefault(str(symbol), (size, here)) if isinstance(symbol, str) else (size, here)
                if first[0] != size:
                    return f"{first[1]} but {here}; the graph was captured for equal sizes there"
        return ""

    def _out_of_range(self, tensors: Sequence[torch.Tensor]) -> str:
        for rule, tensor in zip(self.inputs, tensors, strict=True):
            for dim, (symbol, size) in enumerate(zip(rule.sizes, tensor.shape, strict=True)):
                low, high = self.ranges.get(symbol, (0, _LAST_SIZE)) if isinstance(symbol, str) else (size, size)
                if not low <= size <= high:
                    takes = f"{low} to {high}" if high < _LAST_SIZE else f"{low} or more"
                    return f"{rule.name} has size {size} in dimension {dim}, but the graph takes {takes} there"
        return ""

    def _broken_condition(self, tensors: Sequence[torch.Tensor]) -> str:
        sizes = [tuple(t.shape) for t in tensors]
        for condition in self.conditions:
            if not _holds(condition, sizes):
                return f"the sizes {_shown(self.inputs, sizes)} break the condition {self._named(condition)}"
        return ""

    def _named(self, condition: str) -> str:
        return re.sub(r"d\[(\d+)\]\[(\d+)\]", lambda m: f"{self.inputs[int(m[1])].name}.shape[{m[2]}]", condition)

    def that_allow(self, tensors: Sequence[torch.Tensor]) -> SizeRules:
        """The same without ranges and conditions that these tensors break: they will be compared and so are known."""
        sizes = [tuple(t.shape) for t in tensors]
        ranges = dict(self.ranges)
        for rule, size in zip(self.inputs, sizes, strict=True):
            for symbol, n in zip(rule.sizes, size, strict=True):
                low, high = ranges.get(str(symbol), (0, _LAST_SIZE))
                ranges[str(symbol)] = (min(low, n), max(high, n))  # fixed sizes land here too and are never asked
        conditions = tuple(c for c in self.conditions if _holds(c, sizes))
        return dataclasses.replace(self, ranges=ranges, conditions=conditions)

    def pinned(self, keep: set[str]) -> SizeRules:
        """The same with every open size that is not in ``keep`` fixed to that of the example."""
        inputs = tuple(
            dataclasses.replace(
                rule,
                sizes=tuple(
                    size if isinstance(size, int) or size in keep else rule.example[dim]
                    for dim, size in enumerate(rule.sizes)
                ),
            )
            for rule in self.inputs
        )
        return dataclasses.replace(self, inputs=inputs)


def _misfit(rule: InputRule, tensor: Any, any_float: bool) -> str:
    if not isinstance(tensor, torch.Tensor):
        return f"{rule.name} must be a tensor, but is a {type(tensor).__name__}"
    both_float = any_float and rule.dtype.is_floating_point and tensor.dtype.is_floating_point
    if tensor.dtype != rule.dtype and not both_float:
        return f"{rule.name} has dtype {tensor.dtype}, but the graph was captured with {rule.dtype}"
    if tensor.dim() != len(rule.sizes):
        return f"{rule.name} has {tensor.dim()} dimensions, but the graph was captured with {len(rule.sizes)}"
    for dim, (wanted, size) in enumerate(zip(rule.sizes, tensor.shape, strict=True)):
        if isinstance(wanted, int) and wanted != size:
            return f"{rule.name} has size {size} in dimension {dim}, but the graph was captured for size {wanted} only"
    return ""


def _holds(condition: str, sizes: Sequence[tuple[int, ...]]) -> bool:
    try:
        return bool(eval(condition, {"d": sizes, "math": math, "min": min, "max": max, "__builtins__": {}}))
    except Exception:  # a condition in words this file does not know is none: the graph's own ops will complain
        return True


def _shown(inputs: Sequence[InputRule], sizes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(f"{rule.name}: {size}" for rule, size in zip(inputs, sizes, strict=True))


def rules_of(exported: Exported, names: Sequence[str], leaves: Sequence[torch.Tensor]) -> SizeRules:
    """Read the rules from the symbolic sizes of an exported program's inputs."""
    values = _input_values(exported)
    inputs = tuple(
        InputRule(name, leaf.dtype, tuple(_size(s) for s in value.shape), tuple(leaf.shape))
        for name, leaf, value in zip(names, leaves, values, strict=True)
    )
    ranges = {str(s): (_bound(r.lower), _bound(r.upper)) for s, r in exported.program.range_constraints.items()}
    conditions = tuple(_SIZE.sub(r"d[\1][\2]", guard) for guard in exported.guards)
    return SizeRules(inputs, ranges, tuple(c for c in conditions if "L[" not in c))


def _input_values(exported: Exported) -> list[torch.Tensor]:
    wanted = set(exported.program.graph_signature.user_inputs)
    nodes: list[fx.Node] = list(exported.program.graph.find_nodes(op="placeholder"))
    return [n.meta["val"] for n in nodes if n.name in wanted]


def _size(size: int | torch.SymInt) -> int | str:
    return size if isinstance(size, int) else str(size)


def _bound(value: Any) -> int:
    try:
        return min(int(value), _LAST_SIZE)
    except (TypeError, OverflowError, ValueError, AttributeError):
        return _LAST_SIZE if str(value).startswith("int_oo") or str(value) == "oo" else 0
