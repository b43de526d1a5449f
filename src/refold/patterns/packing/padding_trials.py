"""Does anything real depend on what stands at padding? Tried in float64, with finite garbage of all sizes there.

Token-wise nodes compute every token by itself, so real tokens could only learn of padded ones where a value leaves the
packed tokens: at attention, and at whatever else runs on the grid. These parts alone are run, on random tokens, whole
batches of them with several kinds of padding. What they give back to real tokens, and what the model gives out, must
have the very same bits whatever stands at padding at all places together. By induction along the graph, the packed
tokens are then those of the padded batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node
from torch.fx.node import map_aggregate

from refold.fingerprint import is_sharded
from refold.graph.layout import hands_out
from refold.graph.targets import name_of
from refold.graph.values import example_value
from refold.nested import tensors_in
from refold.patterns.packing.grids import HANDS_ON, Grid
from refold.patterns.packing.token_wise import made_from, places_read, reads_tokens
from refold.record.copies import copy_with
from refold.rewrite.operators import Attention
from refold.rewrite.refusal import Refuse
from refold.weights.sharded import lay_out

_ROWS = 3
_LENGTHS = (6, 40)
_SCALES = (1.0, 1e6)
_ROW_OF_NUMBERS, _STRIDE = 1_048_583, 7919  # primes, so that sizes of models do not divide them
_WIDE = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What operators raise where they do not take their operands."""
_CPU = torch.device("cpu")
SIDES = {"any": ("right", "left", "mixed"), "right": ("right",), "left": ("left",)}


@dataclass
class PaddingTrial:
    """A packing that is to be tried: the nodes that would run on packed tokens, the attention among them."""

    grid: Grid
    members: set[Node]
    attentions: dict[Node, Attention]

    brought: dict[tuple[Node, bool], Any] = field(default_factory=dict, repr=False)
    """The weights of what is run, on the CPU, wide or not."""

    @cached_property
    def derived(self) -> set[Node]:
        """What is not packed and made from what is."""
        return made_from(self.grid.view, self.members)

    @cached_property
    def reads(self) -> dict[Node, tuple[Node, Node]]:
        """Where something on the grid reads packed values at rows and positions that are computed from the inputs."""
        found: dict[Node, tuple[Node, Node]] = {}
        for node in self.grid.view.nodes:
            chosen = places_read(self.grid, node) if node in self.derived else None
            if chosen is not None and self.derived.isdisjoint(chosen) and self.members.isdisjoint(chosen):
                found[node] = chosen
        return found

    def reads_padding(self, side: str) -> bool:
        """Whether something real depends on what stands at padding, with masks padded on a side."""
        return any(self._changes(run) for run in self._runs(side))

    def readers_of_padding(self, side: str) -> set[Node]:
        """The packed values whose padding something real depends on, with masks padded on a side."""
        for run in self._runs(side):
            if self._changes(run):
                exits = frozenset(run.exits)
                expected = run.checked(frozenset(), 0.0)
                return {n for n in exits if not _same(expected, run.checked((n,), _SCALES[-1]))} or set(exits)
        return set()

    def _runs(self, side: str) -> Iterator[_Run]:
        lengths = list(_lengths(self.grid))
        for kind, length, agreeing in product(SIDES[side], lengths, (True, False)):
            yield _Run(self, kind, length, agreeing)
        own_dtypes = SIDES[side] if self.grid.view.recorded_dtypes_hold else ()
        for kind in own_dtypes:  # what is finite in float64 may be infinite in the dtypes of the model
            yield _Run(self, kind, lengths[-1], True, wide=False)

    def _changes(self, run: _Run) -> bool:
        expected = run.checked((), 0.0)
        exits = frozenset(run.exits)
        scales = _SCALES if run.wide else _SCALES[:1]
        return any(not _same(expected, run.checked(exits, scale)) for scale in scales) or run.is_infinite


def _same(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(nan=0.5), b.nan_to_num(nan=0.5)) for a, b in zip(before, after, strict=True))


def _lengths(grid: Grid) -> Iterator[int]:
    """Lengths that the graph takes."""
    size = grid.length.node
    bounds = size.shape_env.var_to_range.get(size.expr)
    low, high = (int(bounds.lower), bounds.upper) if bounds is not None else (2, _LENGTHS[-1])
    yield from sorted({max(low, int(min(high, length))) for length in _LENGTHS})


class _Run:
    """Runs what is not packed, on tokens that are drawn; the same real ones every time."""

    def __init__(self, trial: PaddingTrial, kind: str, length: int, agreeing: bool, wide: bool = True) -> None:
        self.wide = wide
        """Whether all is computed in float64."""
        self.trial, self.grid, self.gm = trial, trial.grid, trial.grid.view.gm
        self.is_infinite = False
        """Whether finite numbers became infinite, or none, at padding."""
        self.agreeing = agreeing
        """Whether ids say what the mask says: a number that they are compared with stands at padding alone."""
        self.real = _padding(kind, length)
        self.sizes = _chosen_sizes(self.grid, length)
        self.inputs: dict[Node, Any] = {}
        generator = torch.Generator().manual_seed(0)
        for node in self.grid.view.nodes:
            if node.op == "placeholder":
                self.inputs[node] = self._input(node, generator)

    @cached_property
    def exits(self) -> list[Node]:
        """The packed values that something on the grid reads, or attention."""
        return [n for n in self.grid.view.nodes if n in self.trial.members and any(map(self._is_outside, n.users))]

    @cached_property
    def skipped(self) -> dict[Node, Any]:
        """What reads sizes, dtype or device of packed values alone."""
        readers = {u for n in self.trial.members for u in n.users if u not in self.trial.members}
        return {n: self._size(n) for n in readers if not reads_tokens(n)}

    def _size(self, node: Node) -> Any:
        recorded = node.meta.get("val")
        if isinstance(recorded, int | torch.SymInt):
            return evaluated(recorded, self.sizes)
        if node.args[1:2] == ("device",):
            return torch.device("cpu")
        given = example_value(node.args[0])
        return torch.float64 if self.wide or given is None else given.dtype

    def _is_outside(self, user: Node) -> bool:
        return user in self.trial.attentions or (user not in self.trial.members and reads_tokens(user))

    def checked(self, garbage: Collection[Node], scale: float) -> list[torch.Tensor]:
        """What real tokens and the caller are given, with garbage at the padding of some packed values."""
        values: dict[Node, Any] = self.inputs | self.skipped
        tokens, noise = _Numbers(1), _Numbers(2)
        found: list[Any] = []
        with torch.no_grad():
            for node in self.grid.view.nodes:
                if node in self.trial.attentions:
                    found.append(self._handed_back(node, self._attend(self.trial.attentions[node], values)))
                if node in self.trial.members:
                    if node in self.exits:
                        amount = scale if node in garbage else 0.0
                        values[node] = self._drawn(node, tokens, noise, amount)
                    continue
                if node.op == "output":
                    found += [values[n] for n in node.all_input_nodes if n in self.trial.derived]
                elif node not in values:
                    values[node] = self._called(node, values)
                if node in self.trial.derived and any(user in self.trial.members for user in node.users):
                    found.append(self._handed_back(node, values[node]))
        return list(tensors_in(found))

    def _handed_back(self, node: Node, value: Any) -> Any:
        """What of a value belongs to real tokens. What stands at padding must stay finite: it goes on as garbage."""
        if isinstance(value, torch.Tensor) and not bool(value.isfinite().all()):
            self.is_infinite = True
        return self._real(node, value)

    def _at_real_places(self, node: Node, values: dict[Node, Any]) -> dict[Node, Any]:
        """The places that a node reads of themselves, where they are real; else others. Only such calls are packed."""
        rows, positions = self.trial.reads[node]
        row, position = torch.broadcast_tensors(values[rows], values[positions])
        first = self.real.long().argmax(1)
        return {rows: row, positions: torch.where(self.real[row, position], position, first[row])}

    def _called(self, node: Node, values: dict[Node, Any]) -> Any:
        if node in self.trial.reads:
            values = values | self._at_real_places(node, values)
        if hands_out(node):  # the caller reads no padding of packed values, and is given zeros there
            given = {n: self._zeroed(n, values[n]) for n in node.all_input_nodes if n in self.trial.members}
            values = values | given
        try:
            found = call_on_cpu(self.gm, node, values, self.wide, self.trial.brought)
            return found.clone() if node.op == "get_attr" and node in self.grid.view.written else found
        except _REFUSALS as error:
            first = str(error).partition("\n")[0]
            raise Refuse(f"{node.name} could not be run to see whether it reads padding: {first}") from None

    def _zeroed(self, node: Node, value: torch.Tensor) -> torch.Tensor:
        row, position = self.grid.place(node) or (0, 1)
        sizes = [size if d in (row, position) else 1 for d, size in enumerate(value.shape)]
        return value.masked_fill(~self._real_places(node).reshape(sizes), 0)

    def _real_places(self, node: Node) -> torch.Tensor:
        """Where a value stands at real tokens, by rows and those positions that it has."""
        window = self.grid.window(node)
        return self.real[:, window.front : self.real.shape[1] - window.behind]

    def _attend(self, call: Attention, values: dict[Node, Any]) -> torch.Tensor:
        query, key, value, mask = (
            values[n] if isinstance(n, Node) else n for n in (call.query, call.key, call.value, call.attn_mask)
        )
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=call.is_causal, scale=call.scale, enable_gqa=call.enable_gqa
        )

    def _real(self, node: Node, value: Any) -> Any:
        """What of a value belongs to real tokens."""
        place = self.grid.place(node)
        row, position = place or (None, None)
        if not isinstance(value, torch.Tensor) or row is None or position is None:
            return value
        if row == position:
            return value.movedim(row, 0)[self.real.flatten()]
        return value.movedim((row, position), (0, 1))[self._real_places(node)]

    # --- drawing -----------------------------------------------------------------------------------------------------

    def _drawn(self, node: Node, tokens: _Numbers, noise: _Numbers, scale: float) -> Any:
        """Random numbers at real tokens, garbage at the others."""
        recorded = node.meta["val"]
        if isinstance(recorded, tuple | list):
            return [self._drawn_tensor(node, v, tokens, noise, scale) for v in recorded]
        return self._drawn_tensor(node, recorded, tokens, noise, scale)

    def _drawn_tensor(
        self, node: Node, like: torch.Tensor, tokens: _Numbers, noise: _Numbers, scale: float
    ) -> torch.Tensor:
        shape = self.shape(like)
        dtype = torch.float64 if self.wide else like.dtype
        drawn = tokens.next(shape).to(dtype)
        garbage = (noise.next(shape) * scale).to(dtype) if scale else torch.zeros(shape, dtype=dtype)
        row, position = self.grid.place(node) or (None, None)
        assert row is not None and position is not None
        sizes = [size if d in (row, position) else 1 for d, size in enumerate(shape)]
        there = self._real_places(node)
        real = there if row < position else there.T
        return torch.where((there.flatten() if row == position else real).reshape(sizes), drawn, garbage)

    def shape(self, like: torch.Tensor) -> list[int]:
        """Recorded sizes, with those that were chosen."""
        return [evaluated(size, self.sizes) for size in like.shape]

    def _input(self, node: Node, generator: torch.Generator) -> Any:
        recorded = example_value(node)
        if recorded is None:
            given = node.meta.get("val")
            return evaluated(given, self.sizes) if isinstance(given, int | torch.SymInt) else given
        shape = self.shape(recorded)
        if node is self.grid.mask:
            return _mask_like(recorded, shape, self.real, self.wide)
        if recorded.is_floating_point():
            dtype = torch.float64 if self.wide else recorded.dtype
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        highest = 2 if recorded.dtype == torch.bool else _table_size(self.grid, node)
        drawn = torch.randint(0, highest, shape, generator=generator)
        marks = [mark for mark in compared_with(node) if 0 <= mark < highest]
        if marks and self.grid.place(node) == (0, 1):
            drawn = self._marked(drawn, marks, highest, generator)
        return drawn.to(recorded.dtype)

    def _marked(self, drawn: torch.Tensor, marks: list[int], highest: int, generator: torch.Generator) -> torch.Tensor:
        """Ids with special ones among them: at padding and nowhere else, or anywhere."""
        chosen = torch.randint(0, len(marks), drawn.shape, generator=generator)
        if not self.agreeing:
            anywhere = torch.rand(drawn.shape, generator=generator) < 0.4
            return torch.where(anywhere, torch.tensor(marks)[chosen], drawn)
        usual = torch.tensor([i for i in range(min(highest, len(marks) + 8)) if i not in marks] or [0])
        return torch.where(self.real, usual[drawn % len(usual)], torch.tensor(marks[0]))


class _Numbers:
    """Random numbers, the same for a seed every time: stretches of one long row, which are quick to take and overlap
    in no simple way."""

    def __init__(self, seed: int) -> None:
        self._row, self._start = _long_row(seed), 0

    def next(self, shape: list[int]) -> torch.Tensor:
        """Other ones than the last, in this shape."""
        count = math.prod(shape)
        if count > len(self._row) - _STRIDE:
            self._row = self._row.repeat(2 + count // len(self._row))
        if self._start + count > len(self._row):
            self._start %= _STRIDE
        self._start += count
        return self._row[self._start - count : self._start].reshape(shape)


@functools.cache
def _long_row(seed: int) -> torch.Tensor:
    return torch.randn(_ROW_OF_NUMBERS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _padding(kind: str, length: int) -> torch.Tensor:
    """Where tokens are real: one row without padding, and two with."""
    counts = torch.tensor([length, max(1, length // 3), max(1, 2 * length // 3)])[:, None]
    right = torch.arange(length) < counts
    if kind == "mixed":
        order = torch.rand(_ROWS, length, generator=torch.Generator().manual_seed(3)).argsort(1)
        return right.gather(1, order)
    return right if kind == "right" else right.flip(1)


def _mask_like(recorded: torch.Tensor, shape: list[int], real: torch.Tensor, wide: bool) -> torch.Tensor:
    """A mask of the dtype and rank that the model takes."""
    dtype = _WIDE.get(recorded.dtype, recorded.dtype) if wide else recorded.dtype
    if len(shape) == 2:
        return real.to(dtype)
    opened = real.reshape(_ROWS, *[1] * (len(shape) - 2), shape[-1]).expand(shape)
    if not dtype.is_floating_point:
        return opened.to(dtype)
    return torch.zeros(shape, dtype=dtype).masked_fill(~opened, torch.finfo(recorded.dtype).min)


def _chosen_sizes(grid: Grid, length: int) -> dict[Any, int]:
    """A number for every open size of the inputs: first sizes are rows."""
    found: dict[Any, int] = {}
    for node in grid.view.nodes:
        recorded = example_value(node) if node.op == "placeholder" else None
        for dim, size in enumerate(() if recorded is None else recorded.shape):
            if isinstance(size, torch.SymInt):
                found.setdefault(size.node.expr, _ROWS if dim == 0 else size.node.hint)
    found |= {grid.rows.node.expr: _ROWS, grid.length.node.expr: length}
    open_sizes = ((size, same) for size, same in grid.mask_sizes if isinstance(size, torch.SymInt))
    return found | {size.node.expr: found[same.node.expr] for size, same in open_sizes}


def evaluated(size: Any, chosen: dict[Any, int]) -> int:
    """A recorded size, with numbers for the open ones."""
    if isinstance(size, int):
        return size
    found = size.node.expr.subs(chosen)
    if not found.is_number:
        raise Refuse(f"a size {size} of it depends on the data")
    return int(found)


_COMPARED = {"eq", "ne"}


def compared_with(node: Node) -> list[int]:
    """The numbers that ids are compared with: padding, separators, ends."""
    found: list[int] = []
    for user in node.users:
        other = user.args[1] if len(user.args) > 1 else None
        if name_of(user) in _COMPARED and user.args[0] is node and isinstance(other, int):
            found.append(other)
        elif name_of(user) in HANDS_ON and user.args[:1] == (node,):
            found += compared_with(user)
    return list(dict.fromkeys(found))


def _table_size(grid: Grid, node: Node) -> int:
    """How many entries the tables have that ids look up; other whole numbers are 0 or 1."""
    found = []
    for user in node.users:
        module = grid.view.module(str(user.target)) if user.op == "call_module" else None
        weight: Any = getattr(module, "weight", None) if isinstance(module, nn.Embedding) else None
        if weight is None and user.op == "call_function" and name_of(user) == "embedding":
            weight = example_value(user.args[0])
        if weight is not None:
            found.append(int(weight.shape[0]))
    return min(found, default=2)


def call_on_cpu(
    gm: nn.Module, node: Node, values: dict[Node, Any], wide: bool, weights: dict[tuple[Node, bool], Any]
) -> Any:
    """What a node gives on the CPU, from the values of those that it reads; in float64, or in its own dtypes. Its own
    weights are brought there once."""
    dtypes = _WIDE if wide else {}

    def fill(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return dtypes.get(value, value)
        if isinstance(value, torch.device):
            return _CPU
        return values[value] if isinstance(value, Node) else value

    def brought(value: Any) -> Any:
        if isinstance(value, nn.Module):
            there = not wide and all(
                t.device == _CPU and not is_sharded(t) for t in (*value.parameters(), *value.buffers())
            )
            return value if there else copy_with(value, _whole_copy).to(_CPU, torch.float64 if wide else None)
        if isinstance(value, torch.Tensor):
            return _valued(lay_out(value.detach(), None)).to(_CPU, dtypes.get(value.dtype, value.dtype))
        return value

    args, kwargs = map_aggregate(node.args, fill), map_aggregate(node.kwargs, fill)
    if node.op in ("get_attr", "call_module"):
        if (node, wide) not in weights:
            weights[node, wide] = brought(attrgetter(str(node.target))(gm))
        own = weights[node, wide]
        return own(*args, **kwargs) if node.op == "call_module" else own
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return brought(node.target(*args, **kwargs))  # type: ignore[operator]


def _whole_copy(tensor: torch.Tensor) -> torch.Tensor:
    return _valued(lay_out(tensor.detach(), None).clone())


def _valued(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor; one without values (a model without weights, a recipe that is tried) is given some: random numbers, the
    same every time, and zeros where they are whole."""
    if not tensor.is_meta:
        return tensor
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    generator = torch.Generator().manual_seed(tensor.numel())
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
