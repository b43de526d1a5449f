"""The fastest correct way to run a module here: every executor prepared, its outputs checked, all timed in turn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from refold.errors import RefoldError
from refold.executors import Executor, Plain, PreparationFailed, executor_named, executors, unavailable
from refold.executors.catalogue import why_unavailable
from refold.executors.meaning import prepare_as_torch
from refold.measurement.timing import Comparison, Measurement, measure_many, rounds_needed
from refold.nested import OUTPUT, flatten
from refold.optimization.expectations import most_promising_first, why_not_in_time
from refold.optimization.job import Job
from refold.optimization.memory import Memory, prepared_with_memory
from refold.optimization.padded_example import PaddedExample
from refold.optimization.progress import silent
from refold.optimization.steps import Rewritten
from refold.verification.accuracy import OutputReference
from refold.wording import first_line

ORIGINAL = "original"
_MEASURE_SECONDS = {"quick": 1.5, "default": 4.0, "max": 10.0}
_CONFIDENCE = 0.95
_CLOSE = 1.3  # at the example's sizes: what is slower by more is not raced at others
_REWRITTEN = "rewritten"


@dataclass
class Candidates:
    """The executors that are ready to run a module, how exact each of them is, and why others were left out."""

    ready: dict[str, Callable[..., Any]] = field(default_factory=dict)
    grades: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)


@dataclass
class ExecutorChoice:
    """Which executor was chosen, how all of them did, and why others were left out."""

    name: str
    run: Callable[..., Any]
    reads_live_weights: bool
    comparison: Comparison | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    grades: dict[str, str] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)
    rewriting: Measurement | None = None
    """The chosen executor without the rewrites, against itself with them."""
    at_any_size: tuple[Executor, Callable[..., Any]] | None = None
    """What runs calls of other sizes than the example's."""

    def prepare_again(self, module: nn.Module, job: Job) -> None:
        """Prepare what was chosen for another graph."""
        executor, ran = executor_named(self.name), self.run
        self.run = prepare_as_torch(executor, module, *job.arguments)
        if self.at_any_size is not None:
            other, run = self.at_any_size
            self.at_any_size = other, self.run if run is ran else other.prepare(module, *job.arguments)

    @property
    def rewrites_hinder(self) -> bool:
        """Whether the chosen executor runs the model as fast without the rewrites: then that is what `run` does. No
        doubt in their favour here: without them, the model runs as it would be run by hand. Where there was no
        time for rounds that can decide, the median does."""
        if self.rewriting is None:
            return False
        undecidable = len(self.rewriting.ratios) < rounds_needed(_CONFIDENCE)
        return self.rewriting.ratio < 1 if undecidable else not self.rewriting.faster


AsCalled = Callable[[Executor, Callable[..., Any]], Callable[..., Any]]


def choose(job: Job, rewritten: Rewritten, as_called: AsCalled) -> ExecutorChoice:
    """Prepare, check and time the executors; the fastest correct one wins. Rewrites are measured as plain graphs, and
    an engine with rewrites of its own may do better without: the winner is tried on the unrewritten graph as well.
    `as_called` gives a way to run the module with all that a call of the optimized model does around it: that is timed,
    since it weighs more in short calls than in long ones."""
    wanted, left_out = _executors_for(job)
    found = _prepare(job, wanted, job.model if rewritten.gm is None else rewritten.gm, rewritten.reference)
    left_out |= found.left_out
    if not found.ready and job.backend != "auto":
        raise RefoldError(f"the executor {job.backend} cannot run this model: {left_out[job.backend]}")
    job.progress("timing the executors", 0.9)
    candidates = {ORIGINAL: job.model} | {name: as_called(wanted[name], run) for name, run in found.ready.items()}
    comparison = measure_many(
        candidates,
        job.inputs,
        time_budget=_seconds(job),
        baseline=ORIGINAL,
        keep=[ORIGINAL],
        until_decided=True,
        memory=job.effort == "max",
    )
    left_out |= comparison.failed
    name = job.backend
    if name == "auto":
        comparison, name = _winner(job, comparison, candidates)
    reads_live_weights = name == ORIGINAL or wanted[name].reads_live_weights
    run = found.ready.get(name, job.original)
    choice = ExecutorChoice(name, run, reads_live_weights, comparison, left_out, found.grades, found.memory)
    if job.others is not None and rewritten.gm is not None:
        choice.at_any_size = _at_any_size(job, rewritten.gm, wanted, found.ready, comparison, as_called)
    if rewritten.is_changed and name not in (ORIGINAL, Plain.name):
        _try_without_rewrites(job, choice, wanted[name], rewritten)
    return choice


def _at_any_size(
    job: Job,
    gm: nn.Module,
    wanted: Mapping[str, Executor],
    ready: Mapping[str, Callable[..., Any]],
    comparison: Comparison,
    as_called: AsCalled,
) -> tuple[Executor, Callable[..., Any]]:
    """What runs calls of other sizes: the fastest on the mix of sizes, of those that take any."""
    open_ones = {name: run for name, run in ready.items() if wanted[name].takes_any_size and name in comparison.timings}
    if not open_ones:
        return Plain(), Plain().prepare(gm, *job.arguments)
    medians = {name: comparison.timings[name].median for name in open_ones}
    best = min(medians, key=medians.__getitem__)
    open_ones = {name: run for name, run in open_ones.items() if medians[name] < _CLOSE * medians[best]}
    if len(open_ones) > 1:
        candidates = {name: _mixed(job, as_called(wanted[name], run)) for name, run in open_ones.items()}
        best = _compare(job, candidates).best
    return wanted[best], open_ones[best]


def _mixed(job: Job, run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that has the whole mix of sizes run, whatever it is given, so that it is timed as one call."""
    calls = (job.inputs, *(job.others.calls if job.others is not None else ()))
    return lambda *_args, **_kwargs: [call.given_to(run) for call in calls]


def _executors_for(job: Job) -> tuple[dict[str, Executor], dict[str, str]]:
    """The executors that the job asks for, and why others cannot be used."""
    if job.backend != "auto":
        return {job.backend: available_executor(job.backend, job.device)}, {}
    return executors(job.device), unavailable(job.device)


def available_executor(name: str, device: torch.device) -> Executor:
    """The executor of that name, if it can be used on this device."""
    executor = executor_named(name)
    reason = why_unavailable(executor, device)
    if reason is not None:
        raise RefoldError(f"the executor {name} cannot be used here: {reason}.")
    return executor


def _prepare(job: Job, wanted: Mapping[str, Executor], module: nn.Module, reference: OutputReference) -> Candidates:
    """Prepare the executors, and check the outputs of each."""
    found, padded = Candidates(), PaddedExample(module, job.inputs)
    for i, executor in enumerate(most_promising_first(wanted.values(), job.budget.capturing)):
        name = executor.name
        job.progress(f"preparing {name}", 0.9 * i / len(wanted))
        reason = _why_not_now(job, executor, found.ready) if found.ready else None
        if reason is not None:
            found.left_out[name] = reason
            continue
        try:
            prepare = functools.partial(prepare_as_torch, executor, module, *job.arguments)
            run, found.memory[name] = prepared_with_memory(job, prepare)
            output = job.call(run)
            _refuse_layouts(output)
            graded = reference.grade(output)
        except Exception as error:  # whatever an engine raises, it is not the way to run this model
            found.left_out[name] = first_line(error)
            continue
        found.grades[name] = graded.grade
        if not graded.acceptable or (job.level == "safe" and graded.grade != "bit-identical"):
            found.left_out[name] = f"its outputs are {graded.grade}"
        elif (above := found.memory[name].why_above(job.max_memory)) is not None:
            found.left_out[name] = above
        elif (objection := padded.objection(run)) is not None:
            found.left_out[name] = f"its outputs are wrong where the mask is not all ones: {objection}"
        elif (objection := _objection_at_other_sizes(job, executor, run)) is not None:
            found.left_out[name] = f"its outputs are wrong {objection}"
        else:
            found.ready[name] = run
    return found


def _objection_at_other_sizes(job: Job, executor: Executor, run: Callable[..., Any]) -> str | None:
    """What is wrong at other sizes with what takes any. The graph itself was tried at them before."""
    if job.others is None or not executor.takes_any_size or executor.name == Plain.name:
        return None
    return job.others.objection(run)


def _why_not_now(job: Job, executor: Executor, ready: Collection[str]) -> str | None:
    """Why there is no time for an executor."""
    if job.effort == "quick" and executor.name != Plain.name:
        return "effort='default' tries it"
    if job.effort != "max" and executor.takes_minutes:
        return "preparing it takes minutes; effort='max' tries it"
    if job.effort != "max" and executor.superseded_by in ready:
        return f"{executor.superseded_by} is usually as fast or faster; effort='max' tries both"
    return why_not_in_time(executor, job.budget)


def _refuse_layouts(output: Any) -> None:
    for tensor in flatten(output, OUTPUT)[1]:
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise PreparationFailed(f"An output is a {kind} tensor, which cannot be compared with the model's.")


def _winner(job: Job, comparison: Comparison, candidates: Mapping[str, Callable[..., Any]]) -> tuple[Comparison, str]:
    """The fastest; those that are level with it are timed once more among themselves, where no rounds are spent on
    others, and all their rounds count. Also the comparison with these rounds."""
    level = comparison.undecided
    if len(level) < 2 or job.budget.left <= 0:
        return comparison, comparison.best
    again = _compare(job, {name: candidates[name] for name in level})
    together = comparison.followed_by(again)
    return together, together.among(again.timings).best


def _try_without_rewrites(job: Job, choice: ExecutorChoice, executor: Executor, rewritten: Rewritten) -> None:
    """Time the chosen executor on the graph without its rewrites, and choose that where it is as fast."""
    name, module, budget = choice.name, rewritten.unrewritten, job.budget
    job.progress(f"timing {name} without the rewrites", 0.95)
    if module is None or job.effort == "quick" or why_not_in_time(executor, budget) is not None:
        return
    found = _prepare(replace(job, progress=silent), {name: executor}, module, rewritten.reference)
    if name not in found.ready or budget.left <= 0:
        return
    pair = {name: found.ready[name], _REWRITTEN: choice.run}
    compared = _compare(job, pair, keep=pair)
    if compared.failed:
        return
    choice.rewriting = compared.between(name, _REWRITTEN)
    if choice.rewrites_hinder:
        choice.run, choice.grades = found.ready[name], choice.grades | found.grades


def _compare(job: Job, candidates: Mapping[str, Callable[..., Any]], keep: Collection[str] = ()) -> Comparison:
    """Time a few candidates until one is faster beyond the noise. Two rounds of calls that take seconds decide nothing:
    without a time budget there are as many as it needs."""
    return measure_many(
        candidates,
        job.inputs,
        time_budget=_seconds(job),
        at_least=rounds_needed(_CONFIDENCE) if job.budget.seconds is None else 2,
        until_decided=True,
        confidence=_CONFIDENCE,
        memory=False,
        keep=keep,
    )


def _seconds(job: Job) -> float:
    """For one comparison."""
    return max(1.0, job.budget.share(0.5, _MEASURE_SECONDS[job.effort]))
