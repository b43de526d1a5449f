"""Other calls of a model than the given one: other sizes, masks with padding, other integers.

A call is varied by what the graph says about its inputs: which sizes are open, which integers are indices and into how
large a table. Whatever the model does not take says nothing about a rewrite, so of several variants the first that it
takes is enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold.capture.captured import RECORD, CaptureRecord
from refold.nested import tensors_in
from refold.verification import discrete_draws as kinds
from refold.verification.discrete_draws import DiscreteDraws, is_discrete, is_mask
from refold.verification.integer_uses import IntegerUses, Use
from refold.verification.samples import ROWS, NamedCall

Symbol = Any
_LARGE_INPUT = 2**16  # numbers; what is larger is not made longer
_MORE = 16


def fewer_rows(call: NamedCall) -> NamedCall:
    """The first rows of a large batch: they take the same way through a model, in less time."""
    sizes = _Sizes(call)
    return sizes.changed({s: ROWS for s in sizes.rows if sizes.of[s] > ROWS}) if sizes.rows else call


@dataclass(frozen=True)
class VariedCalls:
    """Variants of a call that a model took; `watched` saw how it uses the call's tensors."""

    model: nn.Module
    call: NamedCall
    watched: IntegerUses
    seed: int

    def __iter__(self) -> Iterator[tuple[NamedCall, ...]]:
        sizes = [_Sizes(self.call, self.model), _Sizes(self.call, self.model, together=True)]
        short = [call for s in sizes for call in s.shorter()]
        alone = [s.with_rows() for s in sizes]
        if sum(t.numel() for t in self.call.tensors) <= _LARGE_INPUT:
            alone = [call for s in sizes for call in s.longer()] + alone
        yield self._variants("shorter", kinds.RIGHT, short)
        yield self._variants("one row", kinds.LEFT, alone)
        if any(map(is_discrete, self.call.tensors)):
            yield self._variants("shorter", kinds.ROWS, short)

    def _variants(self, name: str, kind: int, resized: list[NamedCall]) -> tuple[NamedCall, ...]:
        """Other sizes and other values; other sizes alone where the model does not take these values, and so on."""
        by_shapes = {tuple(t.shape for t in call.tensors): call for call in reversed([self.call, *resized])}
        sized = [call for call in reversed(by_shapes.values()) if call is not self.call]
        found = [self._drawn(call, kind, only_masks) for only_masks in (False, True) for call in sized]
        found += [*sized, *(self._drawn(self.call, kind, only_masks) for only_masks in (False, True))]
        return tuple(replace(call, name=f"{name}, {kinds.NAMES[kind]}") for call in found)

    def _drawn(self, call: NamedCall, kind: int, only_masks: bool) -> NamedCall:
        draws = DiscreteDraws(sorted(self.watched.numbers), self.seed)
        uses = dict(zip(map(id, call.tensors), self.watched.uses, strict=True))  # in the same order as those watched

        def draw(tensor: torch.Tensor) -> torch.Tensor:
            use = uses.get(id(tensor), Use(free=False))
            if is_mask(tensor, use):
                return draws.draw(tensor, use, kind)
            if only_masks or not is_discrete(tensor):
                return tensor
            return draws.draw(tensor, use, kinds.RANDOM if use.free else kinds.RIGHT)

        return call.map(draw)


class _Sizes:
    """The sizes of a call's tensors that may be open: by the symbols of a captured graph, or (`together`, and for all
    other graphs) those that are equal along the same axis as one."""

    def __init__(self, call: NamedCall, model: nn.Module | None = None, together: bool = False) -> None:
        self.call = call
        assumed = _assumed(call.tensors)
        recorded = _recorded(model, call) or assumed
        pairs = zip(recorded, assumed, strict=True)
        self.symbols = [tuple(b if a and together else a for a, b in zip(*two, strict=True)) for two in pairs]
        sized = [pair for s, t in zip(self.symbols, call.tensors, strict=True) for pair in zip(s, t.shape, strict=True)]
        self.of = {symbol: size for symbol, size in sized if symbol is not None}
        first = [s[0] for s in self.symbols if s and s[0] is not None]
        most = max((self.of[s] for s in first), key=[self.of[s] for s in first].count, default=0)
        self.rows = [s for s in dict.fromkeys(first) if self.of[s] == most]
        self.lengths = [s for s in self.of if s not in self.rows]

    def with_rows(self) -> NamedCall:
        """One row, or two where there is one."""
        return self.changed(self._one_row())

    def shorter(self) -> Iterator[NamedCall]:
        """About half of all lengths; of some; of the first alone, so that the others stay divisible."""
        for lengths in (*self._choices(), self.lengths[:1]):
            yield self.changed(_distinct({s: self.of[s] // 2 for s in lengths}, -1))

    def longer(self) -> Iterator[NamedCall]:
        """One row, and lengths beyond those that were given: a window as wide as they are is seen."""
        for lengths in self._choices():
            wanted = {s: self.of[s] + min(self.of[s] + 1, _MORE) for s in lengths}
            yield self.changed(self._one_row() | _distinct(wanted, 1))

    def _one_row(self) -> dict[Symbol, int]:
        return {s: 1 if self.of[s] != 1 else 2 for s in self.rows}

    def _choices(self) -> Iterator[list[Symbol]]:
        """All lengths, those behind the channels, those before the features."""
        yield self.lengths
        if self.lengths and isinstance(self.lengths[0], tuple):
            yield [s for s in self.lengths if s[0] > 1]
            yield [s for s in self.lengths if s[0] == 1]

    def changed(self, wanted: dict[Symbol, int]) -> NamedCall:
        """The call with other sizes: cut off, or going on from the start again."""
        symbols = dict(zip(map(id, self.call.tensors), self.symbols, strict=True))

        def resize(tensor: torch.Tensor) -> torch.Tensor:
            for dim, symbol in enumerate(symbols.get(id(tensor), ())):
                size = wanted.get(symbol, tensor.shape[dim])
                if size < tensor.shape[dim]:
                    tensor = tensor.narrow(dim, 0, size)
                elif size > tensor.shape[dim] > 0:
                    places = torch.arange(size, device=tensor.device) % tensor.shape[dim]
                    tensor = tensor.index_select(dim, places)
            return tensor

        return self.call.map(resize)


def _distinct(wanted: dict[Symbol, int], step: int) -> dict[Symbol, int]:
    """Such sizes, no two of them equal."""
    found: dict[Symbol, int] = {}
    for symbol, size in wanted.items():
        while size in found.values():
            size += step
        if size > 0:
            found[symbol] = size
    return found


def _assumed(tensors: Sequence[torch.Tensor]) -> list[tuple[Symbol, ...]]:
    return [tuple((dim, size) for dim, size in enumerate(t.shape)) for t in tensors]


def _recorded(model: nn.Module | None, call: NamedCall) -> list[tuple[Symbol, ...]] | None:
    """The symbols of open sizes, None for fixed ones, as the graph was captured."""
    record = model.meta.get(RECORD) if isinstance(model, GraphModule) else None
    if not isinstance(record, CaptureRecord):
        return None
    given = [
        call.args[i] if i < len(call.args) else call.kwargs.get(argument.name)
        for i, argument in enumerate(record.call.arguments)
    ]
    places = {id(t): i for i, t in enumerate(tensors_in(given))}
    rules = record.sizes.inputs
    if len(places) != len(rules) or any(id(t) not in places for t in call.tensors):
        return None
    found = [rules[places[id(t)]].sizes for t in call.tensors]
    return [tuple(size if isinstance(size, str) else None for size in sizes) for sizes in found]
