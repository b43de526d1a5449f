"""One transformation after the other: applied, verified and kept or reverted; then measured, all against none."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from refold.capture.exclusive import alone
from refold.errors import RefoldError
from refold.executors import CudaGraph
from refold.executors.packed_cuda_graph import PackedCudaGraph
from refold.measurement.clock import seconds_of
from refold.measurement.timing import Measurement, measure, measure_many, rounds_needed
from refold.nested import same_leaves
from refold.optimization.job import Job
from refold.record.change import Change
from refold.record.copies import shared_copy
from refold.record.outcome import Result, result
from refold.record.reversal import undo
from refold.record.stack import history
from refold.report.data import GraphData
from refold.report.graph_nodes import graph_data
from refold.rewrite.transformation import Transformation
from refold.verification.accuracy import Graded, OutputReference
from refold.verification.verdicts import Verification
from refold.verification.verifier import verify_last
from refold.wording import first_line

_MEASURE_SECONDS = 2.0
_REWRITING_SHARE = 0.6  # of a time budget; the rest is for choosing how to run the result
_STEP_SHARE = 0.1  # of what is left, for measuring one step
_FEWEST_CALLS = 8  # of a measurement: two to warm up and two rounds, of both versions
_SLOWER = "It was slower on this machine."
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

    def reverted(self, why: str) -> Step:
        """The same step after it was undone."""
        return replace(self, status="taken back", note=why, changes=0)


@dataclass(frozen=True)
class Rewritten:
    """A captured model after its rewrites; without a graph, a model that could not be captured."""

    gm: GraphModule | None
    unrewritten: GraphModule | None
    before: GraphData
    steps: list[Step]
    reference: OutputReference
    graded: Graded | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_changed(self) -> bool:
        """Whether a rewrite was kept."""
        return any(step.status == "kept" for step in self.steps)

    @property
    def changes(self) -> list[tuple[int, Change]]:
        """The changes on the graph's history, each with the number of the step that made it."""
        if self.gm is None:
            return []
        by_signature = {s.transformation.signature: i for i, s in enumerate(self.steps) if s.status == "kept"}
        return [(by_signature.get(change.signature, 0), change) for change in history(self.gm)]

    @property
    def exactness(self) -> Verification | None:
        """What the kept steps found at their sites, and how the outputs of the whole rewritten graph are graded."""
        if self.graded is None:
            return None
        kept = [step.verification for step in self.steps if step.status == "kept" and step.verification is not None]
        return functools.reduce(Verification.joined, kept, Verification(outputs=self.graded.outputs))

    def reverted(self, job: Job, why: str) -> Rewritten:
        """Undo every step that was kept."""
        if self.gm is None:
            return self
        _undo(self.gm, None)
        steps = [step.reverted(why) if step.status == "kept" else step for step in self.steps]
        return replace(self, steps=steps, graded=self.reference.grade(job.call(self.gm)))


def rewrite(job: Job, gm: GraphModule) -> Rewritten:
    """Try every transformation of the pipeline on a graph, in place; outputs are no worse than the original's then."""
    unrewritten, before, count = shared_copy(gm), graph_data(gm), max(1, len(job.pipeline))
    steps = []
    for i, transformation in enumerate(job.pipeline):
        job.progress(f"trying {type(transformation).__name__}", 0.9 * i / count)
        steps.append(_try(job, gm, transformation))
    steps = _without_broken(job, gm, steps)
    notes: tuple[str, ...] = ()
    if job.effort == "default":
        job.progress("measuring the rewrites", 0.85)
        steps, notes = _revert_slow(job, unrewritten, gm, steps)
    job.progress("running the float64 reference", 0.9)
    reference = OutputReference.of(unrewritten, job.inputs, only_if_needed=job.effort == "quick")
    steps, graded = _revert_inaccurate(job, gm, steps, reference)
    return Rewritten(gm, unrewritten, before, steps, reference, graded, notes)


def _revert_slow(
    job: Job, unrewritten: GraphModule, gm: GraphModule, steps: list[Step]
) -> tuple[list[Step], tuple[str, ...]]:
    """Measure the graph with all rewrites against the one without any. Only where that does not look faster, each step
    is measured against the one before, in one race, and those that are slower are reverted."""
    kept = [i for i, step in enumerate(steps) if step.status == "kept"]
    whole = _measured(job, unrewritten, gm) if kept else None
    if whole is None:
        return steps, ()
    note = (f"All rewrites together, as plain graphs: {whole.ratio:.2f}×, {whole.verdict}.",)
    if len(kept) == 1:
        steps = [replace(step, measurement=whole) if i == kept[0] else step for i, step in enumerate(steps)]
    elif not _looks_faster(whole):
        steps = _with_measurements(job, unrewritten, gm, steps, kept)
    slow = [i for i, step in enumerate(steps) if step.status == "kept" and _is_slower(step.measurement)]
    return _without(job, gm, steps, slow), note


def _with_measurements(
    job: Job, unrewritten: GraphModule, gm: GraphModule, steps: list[Step], kept: list[int]
) -> list[Step]:
    """The steps, each with its measurement against the step before it."""
    versions = {"none": unrewritten}
    for place, i in enumerate(kept):
        versions[str(i)] = version = shared_copy(gm)
        if later := sum(steps[j].changes for j in kept[place + 1 :]):
            undo(version, later)
    runs = {name: _replayed(job, version) for name, version in versions.items()}
    seconds = job.budget.share(_STEP_SHARE, _MEASURE_SECONDS)
    race = measure_many(runs, job.inputs, time_budget=seconds, confidence=0.99, memory=False, keep=runs)
    steps, names = list(steps), list(versions)
    for before, after in itertools.pairwise(names):
        if before in race.timings and after in race.timings:
            steps[int(after)] = replace(steps[int(after)], measurement=race.between(before, after))
    return steps


def _without_broken(job: Job, gm: GraphModule, steps: list[Step]) -> list[Step]:
    """Revert steps that are right at their sites, and let the model as a whole fail."""
    why = _why_it_fails(job, gm)
    kept = [i for i, step in enumerate(steps) if step.status == "kept"] if why is not None else []
    for place in reversed(range(len(kept))):
        version = shared_copy(gm)
        undo(version, sum(steps[i].changes for i in kept[place:]))
        if _why_it_fails(job, version) is None:
            return _without_broken(job, gm, _without(job, gm, steps, [kept[place]], why or ""))
    return steps


def _why_it_fails(job: Job, gm: GraphModule) -> str | None:
    try:
        job.call(gm)
    except Exception as error:
        return f"The rewritten model cannot be run: {first_line(error)}."
    return None


def _without(job: Job, gm: GraphModule, steps: list[Step], these: list[int], why: str = _SLOWER) -> list[Step]:
    """Revert these steps. Those behind them are made and verified again."""
    if not these:
        return steps
    steps = list(steps)
    again = [i for i in range(these[0], len(steps)) if steps[i].status == "kept"]
    undo(gm, sum(steps[i].changes for i in again))
    for i in again:
        redone = steps[i].reverted(why) if i in these else _try(job, gm, steps[i].transformation)
        steps[i] = redone if i in these else replace(redone, measurement=steps[i].measurement)
    return steps


def _looks_faster(measured: Measurement) -> bool:
    """Whether every round was faster, where there was no time for so many that they prove it: how to run the graph is
    chosen with and without its rewrites in any case."""
    return measured.faster or (len(measured.ratios) < rounds_needed(measured.confidence) and min(measured.ratios) > 1)


def _is_slower(measured: Measurement | None) -> bool:
    return measured is not None and measured.slower and measured.ratio < 1 - _TOO_LITTLE


def _try(job: Job, gm: GraphModule, transformation: Transformation) -> Step:
    """Try one transformation on a graph, in place."""
    if job.budget.used > _REWRITING_SHARE and not job.budget.is_usual:
        return _left_out(transformation, "It was not tried: its share of the time budget was spent.")
    before, changes = shared_copy(gm), len(history(gm))
    try:
        alone(lambda: transformation(gm))
    except Exception as error:  # a plugin may raise anything; the module is as it was before
        return _left_out(transformation, f"It failed and was left out: {type(error).__name__}: {error}")
    outcome, made = result(gm), len(history(gm)) - changes
    if not made:
        return Step(transformation, "refused" if outcome.refused else "no match", outcome)
    step = _judged(job, before, gm, Step(transformation, "kept", outcome, changes=made))
    if step.status != "kept":
        _undo(gm, made)
    return step


def _undo(gm: GraphModule, changes: int | None) -> None:
    """No kernel of another thread may read the memory that weights leave."""
    alone(lambda: undo(gm, changes))


def _left_out(transformation: Transformation, why: str) -> Step:
    return Step(transformation, "refused", Result(repr(transformation), note=why), note=why)


def _judged(job: Job, before: GraphModule, gm: GraphModule, step: Step) -> Step:
    """The step with what verifying and measuring found, which may be a reason to revert it."""
    applied = [step.transformation]
    verification = verify_last(gm, job.inputs, step.changes, before=before, transformations=applied, outputs=False)
    step = replace(step, verification=verification)
    if not verification.right:
        return step.reverted("It did not verify.")
    try:
        if job.level == "safe" and not same_leaves(job.call(before), job.call(gm)):
            return step.reverted("It is right, but not bit-identical.")
        measurement = _measured(job, before, gm) if job.effort == "max" else None
    except Exception as error:  # right at its sites, but the model as a whole fails
        return step.reverted(f"The rewritten model cannot be run: {first_line(error)}.")
    step = replace(step, measurement=measurement)
    if _is_slower(measurement):
        return step.reverted(_SLOWER)
    return step


def _measured(job: Job, before: GraphModule, after: GraphModule) -> Measurement | None:
    """Both versions in turn; None where there is no time to tell, so that one step does not use up that of all others
    (the choice of an executor then measures what they gain together)."""
    budget = job.budget
    if budget.used > _REWRITING_SHARE:
        return None
    seconds = budget.share(0.05, _MEASURE_SECONDS)
    a, b = _replayed(job, before), _replayed(job, after)
    if budget.seconds is not None and _FEWEST_CALLS * _seconds_of_a_call(job, b) > budget.left * _STEP_SHARE:
        return None
    found = measure(a, b, job.inputs, time_budget=seconds, memory=False)
    enough = rounds_needed(found.confidence)
    if len(found.ratios) < enough and max(found.ratios) < 1 and budget.used <= _REWRITING_SHARE:
        # it looks slower: be sure, however long a call takes
        found = measure(a, b, job.inputs, repeats=enough, memory=False)
    return found


def _seconds_of_a_call(job: Job, run: Callable[..., Any]) -> float:
    with torch.no_grad():
        return seconds_of(functools.partial(job.inputs.given_to, run), 1, job.inputs.device(run))


def _replayed(job: Job, gm: GraphModule) -> Callable[..., Any]:
    """On a GPU, launching from Python hides what a rewrite gains: compare captured graphs where that works."""
    if next((t.device.type for t in gm.parameters()), "cpu") != "cuda":
        return gm
    for executor in (PackedCudaGraph(lambda module, is_usual: CudaGraph(new_shapes="capture")), CudaGraph()):
        try:
            return executor.prepare(gm, *job.arguments)
        except RefoldError:
            continue
    return gm


def _revert_inaccurate(
    job: Job, gm: GraphModule, steps: list[Step], reference: OutputReference
) -> tuple[list[Step], Graded]:
    """Revert steps, the last ones first, until the outputs are no worse than the original's. Only the step that made
    the difference stays away: those behind it are tried again. Also how the outputs are graded in the end."""
    steps = list(steps)
    undone: list[int] = []
    graded = reference.grade(job.call(gm))
    for i in reversed([i for i, step in enumerate(steps) if step.status == "kept"]):
        if graded.acceptable:
            break
        worse, undone = graded, [i, *undone]
        _undo(gm, steps[i].changes)
        graded = reference.grade(job.call(gm))
    if not undone:
        return steps, graded
    culprit, *others = undone
    steps[culprit] = steps[culprit].reverted(_why_worse(worse))
    for i in others:
        steps[i] = _try(job, gm, steps[i].transformation)
        if steps[i].status != "kept":
            continue
        found = reference.grade(job.call(gm))
        if found.acceptable:
            graded = found
            continue
        _undo(gm, steps[i].changes)
        steps[i] = steps[i].reverted(_why_worse(found))
    return steps, graded


def _why_worse(graded: Graded) -> str:
    output = next(output for output in graded.outputs if output.grade == graded.grade)
    return f"It is right at every site, but an output of the model is worse with it: {output}."
