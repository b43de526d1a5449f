"""Each distinct operator of an exported program alone: a small call of it, and values drawn for its operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.fx.node import map_aggregate

from refold.executors.indices import index_limits
from refold.executors.value_ranges import MOVING, Program, ValueRanges, bare_name, held_by, writes
from refold.graph.arguments import argument
from refold.nested import tensors_in

_FEW = 16  # sizes beyond are made small: what an operator means does not depend on them
_SEED = 20
_WIDE = ((2**32, 2**32 + 3, -(2**31) - 1, 2**40 + 1, 7), (2**33, 3, -1, 2**40 + 5, 2**32 + 7))
"""Whole numbers for two operands: some are equal in their last 32 bits, some are 0 there, some share higher ones."""

PLAIN = "plain"
RUNS = (PLAIN, "ties", "large", "huge", "NaN", "infinite", "closed", "negative", "wide")
"""What is drawn: ordinary numbers, ties and zeros, numbers that overflow, NaN, infinities, rows that are closed."""


@dataclass(frozen=True)
class Slot:
    """An operand that an operator is given: what a tensor is like, and what it means."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    limit: int | None = None  # indices are below it
    is_divisor: bool = False
    is_mask: bool = False


@dataclass(frozen=True)
class Case:
    """One operator with operands of small sizes."""

    key: str
    name: str
    target: Callable[..., Any]
    args: Any
    kwargs: Any
    slots: tuple[Slot, ...]
    constants: tuple[torch.Tensor, ...]
    writes: bool = False

    def call(self, tensors: list[torch.Tensor], constants: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """The tensors that the operator gives for these operands."""
        held = constants if constants is not None else list(self.constants)
        first = [tensors[0].clone(), *tensors[1:]] if self.writes and tensors else tensors

        def fill(value: Any) -> Any:
            return (first if value.is_input else held)[value.index] if isinstance(value, _Place) else value

        args, kwargs = map_aggregate((self.args, self.kwargs), fill)
        return tensors_in(self.target(*args, **kwargs))


@dataclass(frozen=True)
class _Place:
    is_input: bool
    index: int


@dataclass
class _Parts:
    """The operands of a node as they are taken apart."""

    sizes: dict[int, int]
    slots: list[Slot] = field(default_factory=list)
    held: list[torch.Tensor] = field(default_factory=list)
    words: list[str] = field(default_factory=list)


class Batch(nn.Module):
    """Several cases in one module: an engine prepares them together."""

    def __init__(self, cases: list[Case]) -> None:
        super().__init__()
        self.cases = cases
        for i, case in enumerate(cases):
            for j, constant in enumerate(case.constants):
                self.register_buffer(f"held_{i}_{j}", constant)

    def forward(self, *tensors: torch.Tensor) -> list[list[torch.Tensor]]:
        rest, given = list(tensors), []
        for i, case in enumerate(self.cases):
            mine, rest = rest[: len(case.slots)], rest[len(case.slots) :]
            given.append(case.call(mine, [getattr(self, f"held_{i}_{j}") for j in range(len(case.constants))]))
        return given


def computing(exported: Program, ranges: ValueRanges) -> Iterator[Node]:
    """The nodes that compute something from an input; what only moves elements, or is constant, does not count."""
    depends = {node for node in exported.graph.nodes if node.op == "placeholder" and held_by(exported, node) is None}
    for node in exported.graph.nodes:
        if node.op != "call_function" or depends.isdisjoint(node.all_input_nodes):
            continue
        depends.add(node)
        if node in ranges.known or bare_name(node) in MOVING or not tensors_in(node.meta.get("val")):
            continue
        if bare_name(node) == "getitem" or (bare_name(node) in ("to", "type_as") and not _casts(node)):
            continue
        yield node


def _casts(node: Node) -> bool:
    first = node.args[0]
    return not isinstance(first, Node) or first.meta["val"].dtype != node.meta["val"].dtype


def case_of(exported: Program, ranges: ValueRanges, node: Node, *, small: bool) -> Case:
    """The operator of a node with small operands, or with those that it has. Nothing is computed."""
    tensors = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    large = sorted({int(size) for tensor in tensors for size in tensor.shape if size > _FEW}) if small else []
    parts = _Parts({size: _FEW + 1 + i for i, size in enumerate(large)})
    limits = index_limits(node)

    def take(value: Any) -> Any:
        if isinstance(value, Node):
            return _take_operand(exported, ranges, node, value, parts, limits)
        if type(value) is int:
            value = parts.sizes.get(value, value)
        parts.words.append(repr(value))
        return value

    args, kwargs = map_aggregate((node.args, node.kwargs), take)
    key = " ".join([str(node.target), *node.kwargs, *parts.words])
    slots, held = tuple(parts.slots), tuple(parts.held)
    return Case(key, bare_name(node), node.target, args, kwargs, slots, held, writes(node))  # type: ignore[arg-type]


def _take_operand(
    exported: Program, ranges: ValueRanges, node: Node, operand: Node, parts: _Parts, limits: dict[Node, int]
) -> Any:
    recorded = operand.meta.get("val")
    if not isinstance(recorded, torch.Tensor):
        raise ValueError(f"{operand.name} is no tensor")
    shape = tuple(parts.sizes.get(int(size), int(size)) for size in recorded.shape)
    held = ranges.known.get(operand)
    held = held_by(exported, operand) if held is None else held
    is_index, is_mask = operand in limits, operand is argument(node, 3, "attn_mask")
    few = recorded.numel() < _FEW  # other kernels may compute those
    parts.words.append(f"{'const' if held is not None else 'in'} {recorded.dtype} {len(shape)} {is_index} {few}")
    if held is not None and held.shape == recorded.shape:
        parts.held.append(held.detach()[tuple(map(slice, shape))].clone())
        return _Place(False, len(parts.held) - 1)
    limit = parts.sizes.get(limits[operand], limits[operand]) if is_index else None
    divides = bare_name(node) in ("div", "floor_divide", "remainder", "fmod") and operand is node.args[1]
    parts.slots.append(Slot(shape, recorded.dtype, limit, divides, is_mask))
    return _Place(True, len(parts.slots) - 1)


def drawn(case: Case, run: str) -> list[torch.Tensor]:
    """Operands for one run of a case; the same at every call."""
    generator = torch.Generator().manual_seed(_SEED + RUNS.index(run))
    only_mask = run == "closed" and any(slot.is_mask for slot in case.slots)
    values = [_values(slot, PLAIN if only_mask and not slot.is_mask else run, generator) for slot in case.slots]
    for i, (slot, tensor) in enumerate(zip(case.slots, values, strict=True)):
        if run == "wide" and tensor.dtype == torch.int64 and slot.limit is None and tensor.is_contiguous():
            several = torch.tensor(_WIDE[i % 2])[: tensor.numel()]
            tensor.view(-1)[: several.numel()] = several
    return values


def _values(slot: Slot, run: str, generator: torch.Generator) -> torch.Tensor:
    def even(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, slot.shape, generator=generator)

    if slot.limit is not None:
        return even(0, slot.limit).to(slot.dtype)
    if slot.dtype == torch.bool:
        return _closed_rows(even(0, 2).bool(), run) if slot.is_mask else even(0, 2).bool()
    if not slot.dtype.is_floating_point:
        return _whole(slot, run, even)
    values = torch.randn(slot.shape, generator=generator, dtype=torch.float64) * 2
    if run == "ties":
        values = even(-5, 6) / 2
        values[even(0, 8) == 0] = -0.0
    values = values * {"large": 100.0, "huge": torch.finfo(slot.dtype).max / 100}.get(run, 1.0)
    if slot.is_divisor and run == PLAIN:
        values = values.abs() + 0.5
    if run in ("NaN", "infinite") and values.numel():
        places = torch.randperm(values.numel(), generator=generator)[: max(1, values.numel() // 12)]
        special = [math.nan] if run == "NaN" else [math.inf, -math.inf]
        values.view(-1)[places] = torch.tensor(special * len(places), dtype=torch.float64)[: len(places)]
    if run == "closed" and values.dim():
        values.view(-1, values.shape[-1])[::3] = -math.inf
    return values.to(slot.dtype)


def _closed_rows(mask: torch.Tensor, run: str) -> torch.Tensor:
    if mask.dim() and mask.numel():
        mask[..., 0] = True
        if run == "closed":
            mask.view(-1, mask.shape[-1])[::2] = False
    return mask


def _whole(slot: Slot, run: str, even: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """Whole numbers: small ones, negative ones, and all that the type can hold, or beyond 32 bits."""
    info = torch.iinfo(slot.dtype)
    values = even(0, 9)
    if run == "negative" and info.min < 0:
        values = even(-8, 9)
    if run == "wide":
        values = values + 2**32 * even(-2, 3) if info.bits == 64 else even(info.min, info.max)
    if slot.is_divisor:
        values[values == 0] = 1
    return values.to(slot.dtype)
