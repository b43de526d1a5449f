"""Calls of several kinds: with other switches, without a mask, under autocast. Each kind is prepared by itself.

All kinds are graphs of one model. What one of them merges, the next finds merged; where weights get other memory with
the same contents, what was prepared before goes on with a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from refold.call_arguments import CallArguments
from refold.capture.exclusive import alone
from refold.capture.model_state import all_or_nothing
from refold.errors import RefoldError, UnsupportedInput
from refold.executors import InputSpec
from refold.optimization.preparation import Preparation
from refold.optimization.prepared import Prepared
from refold.optimization.spelling import Spelling
from refold.optimization.watch import ADAPTERS_CHANGED, WEIGHTS_CHANGED, moving_weights
from refold.record.reversal import undo_below
from refold.record.stack import history

MOST_KINDS = 8
_NOT_TIMED = "Prepared again, by the executor that was chosen before: nothing was timed again."


@dataclass
class Kind:
    """One kind of call: how it is prepared for, and what was prepared; None where the model was moved since."""

    preparation: Preparation
    prepared: Prepared | None
    name: str = ""
    """How its calls differ from the example."""
    rewrites: tuple[int, ...] = ()
    """The rewrites that are made again after a move."""
    is_told_by_its_calls: bool = True
    """Whether its calls and what is switched on around them tell it from others: not so where adapters do."""

    @property
    def note(self) -> str:
        """What the report says."""
        how = "prepared by the next call" if self.prepared is None else f"run by {self.prepared.at_example.executor}"
        return f"Calls {self.name}: {how}."


def sorted_by_kind(model: nn.Module, calls: Sequence[CallArguments]) -> list[list[CallArguments]]:
    """Calls of one kind differ in their sizes only; they come back in the spelling of the first of them."""
    kinds: list[tuple[Spelling, InputSpec, list[CallArguments]]] = []
    for call in calls:
        for spelling, spec, others in kinds:
            try:
                same = CallArguments(*spelling.of(call.args, call.kwargs))
                spec.tensors(same.args, same.kwargs)
            except UnsupportedInput:
                continue
            others.append(same)
            break
        else:
            spec = InputSpec.of(call.args, call.kwargs, open_sizes=True)
            kinds.append((Spelling(model.forward, call.args, call.kwargs), spec, [call]))
    if len(kinds) > MOST_KINDS:
        raise _too_many(len(kinds))
    return [found for _, _, found in kinds]


def further_kind(kinds: Sequence[Kind], calls: Sequence[CallArguments]) -> Kind | None:
    """What is prepared for calls of one more kind, of the model of these; None where one of them takes such calls."""
    call, (first, *_) = calls[0], kinds
    known = [kind.prepared for kind in kinds if kind.prepared is not None]
    if any(each.why_not(call) is None and each.is_current() for each in known):
        return None
    if len(kinds) >= MOST_KINDS:
        raise _too_many(len(kinds) + 1)
    preparation = first.preparation.for_calls(calls)
    assert first.prepared is not None
    example = first.prepared
    with _beside(known):
        prepared = all_or_nothing(preparation.job.model, lambda: preparation.like(example))
    by_adapters = any(each.why_not(call) is None for each in known)
    otherwise = "with these adapters active" if by_adapters else "of these other sizes"
    name = _difference(first.preparation, preparation) or otherwise
    return Kind(preparation, prepared, name, is_told_by_its_calls=not by_adapters)


def refreshed(kinds: Sequence[Kind]) -> tuple[list[Prepared], list[str]]:
    """What is prepared for the model as it is now, kind by kind, and what is different in the model. All are made anew
    if one has to be: they share the memory of merged weights."""
    found = [change for kind in kinds if not _rests(kind, kinds) for change in kind.preparation.changes(kind.prepared)]
    changes = list(dict.fromkeys(found))
    before = [kind.prepared for kind in kinds]
    if not changes:
        return [each for each in before if each is not None], []

    def work() -> list[Prepared]:
        undo_all(before)
        made: list[Prepared] = []
        for kind in kinds:
            with _beside(made):
                made.append(_made_again(kind, made, is_quick=set(changes) == {WEIGHTS_CHANGED}))
        return made

    return all_or_nothing(kinds[0].preparation.job.model, work), changes


def _made_again(kind: Kind, made: Sequence[Prepared], *, is_quick: bool) -> Prepared:
    """What is prepared for one kind, once more; like the first where nothing is left of it."""
    if kind.prepared is None:
        return kind.preparation.like(made[0]) if made else kind.preparation.anew(None)
    again = kind.preparation.with_other_weights if is_quick else kind.preparation.anew
    return _reported(again(kind.prepared), kind.prepared)


def _beside(others: Sequence[Prepared]) -> AbstractContextManager[None]:
    """Weights may be given other memory inside, and what was prepared for other kinds goes on."""
    return moving_weights([way.watch for each in others for way in each.ways])


def _rests(kind: Kind, kinds: Sequence[Kind]) -> bool:
    """Whether it waits for another choice of adapters, while one of these runs its calls."""
    if kind.prepared is None or kind.prepared.reasons() != [ADAPTERS_CHANGED]:
        return False
    others = [other.prepared for other in kinds if other is not kind and other.prepared is not None]
    return any(other.why_not(kind.preparation.job.inputs) is None and other.is_current() for other in others)


def _reported(now: Prepared, before: Prepared | None) -> Prepared:
    """With the report of what was timed before, where the same was made again."""
    if before is None or now.report.timings or before.is_for_now:
        return now
    if now.rewrites == before.rewrites and now.at_example.executor == before.at_example.executor:
        return replace(now, report=before.report)
    return replace(now, report=replace(now.report, notes=(*now.report.notes, _NOT_TIMED)))


def undo_all(prepared: Sequence[Prepared | None]) -> None:
    """Undo what was done to the weights of a model, for all kinds of calls."""
    for each in reversed(prepared):
        gm = None if each is None else each.graph_module
        if gm is not None and history(gm):
            alone(lambda gm=gm: undo_below(gm))  # type: ignore[misc]


def _too_many(count: int) -> RefoldError:
    return RefoldError(
        f"{count} kinds of calls are too many: {MOST_KINDS} at most are prepared for. Other sizes are no other kind."
    )


def _difference(example: Preparation, other: Preparation) -> str:
    """How a call differs from the example, in words."""
    spelling = _named(example), _named(other)
    first, second = spelling
    words = [f"with {name}={_shown(value)}" for name, value in second.items() if _differ(value, first.get(name))]
    words += [f"without {name}" for name in first if name not in second]
    if other.surroundings != example.surroundings:
        words.append(f"under {other.surroundings}" if other.surroundings.autocast else "without autocast")
    return ", ".join(words)


def _named(preparation: Preparation) -> dict[str, Any]:
    """The arguments of a call by their names in the signature."""
    inputs = preparation.job.inputs
    return Spelling(preparation.job.model.forward, inputs.args, inputs.kwargs).named(inputs.args, inputs.kwargs)


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (one.dtype, one.device, one.dim()) != (other.dtype, other.device, other.dim())
    return one is not other and not (type(one) is type(other) and repr(one) == repr(other))


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = repr(value)
    return text if len(text) < 40 else f"a {type(value).__name__}"
