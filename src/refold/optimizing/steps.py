"""One transformation after the other: applied, verified, measured, and kept or taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from refold.clock import bind, device_of, seconds_of
from refold.errors import RefoldError
from refold.executors import executors
from refold.executors.base import first_line
from refold.explaining import hollow_copy
from refold.history import history, undo
from refold.measure import Measurement, measure, rounds_needed
from refold.optimizing.budget import Budget
from refold.optimizing.calls import Inputs, split
from refold.result import Result, result
from refold.transformation import Transformation
from refold.verify import Verification, verify_last
from refold.verifying.leaves import same_leaves

_MEASURE_SECONDS = 2.0
_REWRITING_SHARE = 0.5  # of a time budget; the rest is for choosing how to run the result
_STEP_SHARE = 0.1  # of what is left, for measuring one step
_FEWEST_CALLS = 8  # of a measurement: two to warm up and two rounds, of both versions
_TOO_LITTLE = 0.01  # of a call: where its memory happens to lie makes as much, the same in every round


@dataclass(frozen=True)
class Step:
    """What became of one transformation."""

    transformation: Transformation
    status: str
    result: Result
    verification: Verification | None = None
    measurement: Measurement | None = None
    note: str = ""
    changes: int = 0
    """How many it added to the module's history, if it was kept."""


def take_steps(
    gm: GraphModule,
    pipeline: tuple[Transformation, ...],
    inputs: Inputs,
    *,
    level: str,
    budget: Budget,
    tell: Callable[[str, float], None],
) -> list[Step]:
    """Try every transformation of a pipeline on a module, in place."""
    steps = []
    for i, transformation in enumerate(pipeline):
        tell(f"trying {type(transformation).__name__}", i / max(1, len(pipeline)))
        steps.append(take(gm, transformation, inputs, level=level, budget=budget))
    return steps


def take_back(gm: GraphModule, steps: list[Step], why: str) -> list[Step]:
    """Undo every step that was kept."""
    undo(gm, None)
    return [replace(step, status="taken back", note=why) if step.status == "kept" else step for step in steps]


def take(gm: GraphModule, transformation: Transformation, inputs: Inputs, *, level: str, budget: Budget) -> Step:
    """Try one transformation on a module, in place."""
    if budget.used > _REWRITING_SHARE:
        outcome = Result(repr(transformation), note="It was not tried: its share of the time budget was spent.")
        return Step(transformation, "refused", outcome, note=outcome.note)
    before, changes = hollow_copy(gm), len(history(gm))
    try:
        transformation(gm)
    except Exception as error:  # a plugin may raise anything; the module is as it was before
        outcome = Result(repr(transformation), note=f"It failed and was left out: {type(error).__name__}: {error}")
        return Step(transformation, "refused", outcome, note=outcome.note)
    outcome, made = result(gm), len(history(gm)) - changes
    if not made:
        return Step(transformation, "refused" if outcome.refused else "no match", outcome)
    verification = verify_last(gm, inputs, made, before=before, transformations=[transformation], outputs=False)
    if not verification.right:
        undo(gm, made)
        return Step(transformation, "taken back", outcome, verification, note="It did not verify.")
    try:
        is_allowed = level != "safe" or _bit_identical(before, gm, inputs)
        measurement = _measured(before, gm, inputs, budget) if is_allowed else None
    except Exception as error:  # right where it was looked at, but the model as a whole does not bear it
        undo(gm, made)
        note = f"The rewritten model cannot be run: {first_line(error)}."
        return Step(transformation, "taken back", outcome, verification, note=note)
    if not is_allowed:
        undo(gm, made)
        return Step(transformation, "taken back", outcome, verification, note="It is right, but not bit-identical.")
    if measurement is not None and measurement.slower and measurement.ratio < 1 - _TOO_LITTLE:
        undo(gm, made)
        return Step(transformation, "taken back", outcome, verification, measurement, "It was slower on this machine.")
    return Step(transformation, "kept", outcome, verification, measurement, changes=made)


def _bit_identical(before: GraphModule, after: GraphModule, inputs: Inputs) -> bool:
    args, kwargs = split(inputs)
    with torch.no_grad():
        return same_leaves(before(*args, **kwargs), after(*args, **kwargs))


def _measured(before: GraphModule, after: GraphModule, inputs: Inputs, budget: Budget) -> Measurement | None:
    """Both versions in turn; None where there is no time to tell, so that one step does not use up that of all others
    (the choice of an executor then measures what they gain together)."""
    if budget.used > _REWRITING_SHARE:
        return None
    seconds = budget.share(0.05, _MEASURE_SECONDS)
    a, b = _replayed(before, inputs), _replayed(after, inputs)
    if budget.seconds is not None and _FEWEST_CALLS * _seconds_of_a_call(b, inputs) > budget.left * _STEP_SHARE:
        return None
    found = measure(a, b, inputs, time_budget=seconds, memory=False)
    enough = rounds_needed(found.confidence)
    if len(found.ratios) < enough and max(found.ratios) < 1 and budget.used <= _REWRITING_SHARE:
        found = measure(a, b, inputs, repeats=enough, memory=False)  # it looks slower: be sure, however long a call is
    return found


def _seconds_of_a_call(run: Callable[..., Any], inputs: Inputs) -> float:
    with torch.no_grad():
        return seconds_of(bind(run, inputs), 1, device_of([run], inputs))


def _replayed(gm: GraphModule, inputs: Inputs) -> Callable[..., Any]:
    """On a GPU, launching from Python hides what a rewrite gains: compare captured graphs where that works."""
    device = next((t.device for t in gm.parameters()), torch.device("cpu"))
    replay = executors(device).get("cuda_graph") if device.type == "cuda" else None
    if replay is None:
        return gm
    args, kwargs = split(inputs)
    try:
        return replay.prepare(gm, args, kwargs)
    except RefoldError:
        return gm
