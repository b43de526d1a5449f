"""Where an engine gives something else than torch: each operator of a model probed alone, on drawn values.

An engine differs where NaN or infinities stand elsewhere, where integers or booleans are not equal, or where finite
numbers agree in fewer digits than rounding explains. Differences that some values cause are stated as what must hold
for the values (a need); a difference on ordinary values means that the engine cannot be used for the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from refold.executors.operator_cases import PLAIN, RUNS, Batch, Case, case_of, computing, drawn
from refold.executors.value_ranges import Program, ValueRanges
from refold.nested import tensors_in
from refold.wording import first_line

FINITE, NARROW, POSITIVE, OPEN = "finite", "narrow", "positive", "open"
"""What must hold: all is finite; integers are small enough; none is negative; no row of a mask is closed."""

_NEEDS = {"negative": POSITIVE, "wide": NARROW} | dict.fromkeys(("large", "huge", "NaN", "infinite", "closed"), FINITE)
_WORDS = {
    "negative": "for negative integers",
    "wide": "for integers that overflow or are beyond 2³¹",
    "large": "for large numbers",
    "huge": "where numbers overflow",
    "NaN": "for NaN",
    "infinite": "for infinities",
    "closed": "for rows of −∞ or of a mask that is closed",
}
_ANY_ORDER = ("topk", "sort", "argsort", "kthvalue", "median", "mode", "max", "min")
"""Which of equal elements these take is not said."""

Build = Callable[[nn.Module, tuple[Any, ...]], Callable[..., Any]]


@dataclass(frozen=True)
class Answer:
    """What an engine needs to compute an operator as torch does, each need with how it differs; or why not."""

    name: str
    needs: dict[str, str] = field(default_factory=dict)
    refused: str = ""


Answers = dict[str, Answer]
_KEPT: dict[Any, Answers] = {}


def answers_for(engine: Any, build: Build, exported: Program, ranges: ValueRanges) -> dict[Any, Answer]:
    """For each node that computes something: what is known of the engine there. Answers are kept for the process."""
    kept = _KEPT.setdefault(engine, {})
    keys, unknown = {}, {}
    for node in computing(exported, ranges):
        try:
            case = case_of(exported, ranges, node, small=True)
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            key = str(node.target)
            kept[key] = Answer(key, refused=f"it cannot be probed alone ({first_line(error)})")
        else:
            key = case.key
            if key not in kept and key not in unknown:
                unknown[key] = _that_runs(exported, ranges, node, case)
        keys[node] = key
    if unknown:
        kept |= _probe(build, list(unknown.values()))
    return {node: kept[key] for node, key in keys.items()}


def _that_runs(exported: Program, ranges: ValueRanges, node: Any, case: Case) -> Case:
    """The case with small operands where torch takes them, else with those of the model."""
    if _computed(case, PLAIN) is not None:
        return case
    whole = case_of(exported, ranges, node, small=False)
    return replace(whole, key=case.key)


def _computed(case: Case, run: str) -> list[torch.Tensor] | None:
    """What torch gives; None where it raises."""
    try:
        with torch.no_grad():
            return case.call(drawn(case, run))
    except Exception:
        return None


def _probe(build: Build, cases: list[Case]) -> Answers:
    """Probe cases together; where that fails, in halves."""
    try:
        run = build(Batch(cases), tuple(_operands(cases, PLAIN)))
        given = {name: _given(run, cases, name) for name in RUNS}
    except Exception as error:
        if len(cases) == 1:
            case = cases[0]
            return {case.key: Answer(case.name, refused=f"alone, it cannot be run ({first_line(error)})")}
        half = len(cases) // 2
        return _probe(build, cases[:half]) | _probe(build, cases[half:])
    return {case.key: _answer(case, {name: given[name][i] for name in RUNS}) for i, case in enumerate(cases)}


def _operands(cases: Iterable[Case], run: str) -> list[torch.Tensor]:
    return [tensor for case in cases for tensor in drawn(case, run)]


def _given(run: Callable[..., Any], cases: list[Case], name: str) -> list[Any]:
    """What an engine gives for each case; None for a case alone for which it raises."""
    try:
        with torch.no_grad():
            return [tensors_in(part) for part in run(*_operands(cases, name))]
    except Exception:
        if len(cases) > 1 or name == PLAIN:
            raise
        return [None]


def _answer(case: Case, given: dict[str, Any]) -> Answer:
    needs: dict[str, str] = {}
    for run in RUNS:
        mine, its = _computed(case, run), given[run]
        if mine is None and (run == PLAIN or its is None):
            continue
        how = "it raises" if its is None else "torch raises" if mine is None else _difference(mine, its)
        if how is None or (run == "ties" and case.name in _ANY_ORDER):
            continue
        if run == "large" and how == "other numbers":
            continue  # rounding weighs more there
        need = _NEEDS.get(run)
        if run == "closed" and any(slot.is_mask and slot.dtype == torch.bool for slot in case.slots):
            need = OPEN
        if need is None and mine is not None and not all(map(_finite, mine)):
            need, run = FINITE, "NaN"
        if need is None:
            return Answer(case.name, refused=how)
        needs.setdefault(need, f"{how} {_WORDS[run]}")
    return Answer(case.name, needs)


def _finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _difference(mine: list[torch.Tensor], its: list[torch.Tensor]) -> str | None:
    """How the results of an engine differ; None if they do not."""
    if len(mine) != len(its):
        return "another number of results"
    for a, b in zip(mine, its, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return "another shape or type"
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return "other integers or booleans"
            continue
        if not same_specials(a, b):
            return "NaN or infinity elsewhere"
        if a.isfinite().any() and _is_other(a[a.isfinite()], b[a.isfinite()], torch.finfo(a.dtype)):
            return "other numbers"
    return None


def _is_other(mine: torch.Tensor, its: torch.Tensor, info: torch.finfo) -> bool:
    """Whether numbers agree in fewer than three quarters of their digits, those of a number or of all together."""
    most = max(mine.abs().max().item(), info.tiny)
    one, other = mine.double() / most, its.double() / most
    scale = one.abs() + one.square().mean().sqrt()
    return bool(((one - other).abs() > info.eps**0.75 * scale + info.tiny).any())


def same_specials(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether NaN and both infinities stand in the same places."""
    same = torch.equal(one.isnan(), other.isnan())
    return same and all(torch.equal(one == end, other == end) for end in (torch.inf, -torch.inf))
