"""The fastest correct way to run a module here: every executor prepared, its outputs checked, all timed in turn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold.call_arguments import CallArguments
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
from refold.patterns.packing.dense_graph import with_padding
from refold.verification.accuracy import OutputReference
from refold.wording import first_line

ORIGINAL = "original"
_MEASURE_SECONDS = {"quick": 1.5, "default": 4.0, "max": 10.0}
_CONFIDENCE = 0.95
_MOST_RACED = 3  # at other sizes: the fastest at the example's
_REWRITTEN = "rewritten"


@dataclass
class Candidates:
    """The executors that are ready to run a module, how exact each of them is, and why others were left out."""

    ready: dict[str, Callable[..., Any]] = field(default_factory=dict)
    grades: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)


@dataclass(frozen=True)
class ReadyExecutor:
    """One way to run a model, and the executor that prepared it: None for the original."""

    name: str
    run: Callable[..., Any]
    reads_live_weights: bool
    executor: Executor | None = None


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
    at_any_size: ReadyExecutor | None = None
    """What runs calls of other sizes than the example's."""

    def prepare_again(self, module: nn.Module, job: Job) -> None:
        """Prepare what was chosen for another graph."""
        executor, ran = executor_named(self.name), self.run
        self.run = prepare_as_torch(executor, module, *job.arguments)
        other = self.at_any_size
        if other is not None and other.executor is not None:
            run = self.run if other.run is ran else prepare_as_torch(other.executor, module, *job.arguments)
            self.at_any_size = replace(other, run=run)

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
    if job.known and (again := _as_before(job, rewritten)) is not None:
        return again
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
        time_budget=max(_seconds(job), _MEASURE_SECONDS[job.effort]) if job.budget.is_usual else _seconds(job),
        baseline=ORIGINAL,
        keep=[ORIGINAL],
        until_decided=True,
        memory=job.effort == "max",
    )
    left_out |= comparison.failed
    comparison = _with_earlier_rounds(job, comparison)
    name = job.backend
    if name == "auto":
        comparison, name = _winner(job, comparison, candidates)
    reads_live_weights = name == ORIGINAL or wanted[name].reads_live_weights
    run = found.ready.get(name, job.original)
    choice = ExecutorChoice(name, run, reads_live_weights, comparison, left_out, found.grades, found.memory)
    if job.others is not None and rewritten.gm is not None:
        other = _at_any_size(job, rewritten.gm, wanted, found.ready, comparison, as_called)
        choice.at_any_size = other
        if job.backend == "auto" and name != ORIGINAL and _is_level(comparison, name, other.name):
            choice.name, choice.run, choice.reads_live_weights = other.name, other.run, other.reads_live_weights
            name = other.name
    if rewritten.is_changed and name not in (ORIGINAL, Plain.name):
        _try_without_rewrites(job, choice, wanted[name], rewritten)
    return choice


def _with_earlier_rounds(job: Job, comparison: Comparison) -> Comparison:
    """Together with the rounds of an earlier race, behind those of this one: rounds of all stand side by side."""
    timings = {} if job.earlier is None else job.earlier.timings
    alive = [name for name in timings if name in comparison.timings and not comparison.timings[name].dropped]
    return comparison.followed_by(job.earlier.among(alive)) if job.earlier is not None else comparison


def _is_level(comparison: Comparison, name: str, other: str) -> bool:
    """Whether what takes any size is as fast at the example's as the fastest there: then it does for both. Where there
    was no time for rounds that can decide, the median does."""
    if other not in comparison.timings:
        return False
    measured = comparison.between(other, name)
    undecidable = len(measured.ratios) < rounds_needed(_CONFIDENCE)
    return measured.ratio <= 1 if undecidable else not measured.faster


def _as_before(job: Job, rewritten: Rewritten) -> ExecutorChoice | None:
    """The executors that were chosen before; None where the one for the example's sizes is not ready."""
    wanted = {name: available_executor(name, job.device) for name in job.known if name != ORIGINAL}
    gm, name = rewritten.gm, job.known[0]
    found = _prepare(replace(job, effort="max"), wanted, job.model if gm is None else gm, rewritten.reference)
    if name not in found.ready:
        return None
    run = found.ready[name]
    choice = ExecutorChoice(name, run, wanted[name].reads_live_weights, None, found.left_out, found.grades)
    if job.others is not None and gm is not None:
        other = job.known[-1]
        if other == ORIGINAL:
            choice.at_any_size = ReadyExecutor(ORIGINAL, job.original, True)
        elif other in found.ready and wanted[other].takes_any_size:
            choice.at_any_size = ready_executor(wanted[other], found.ready[other])
        else:
            choice.at_any_size = _plainly(job, gm)
    return choice


def ready_executor(executor: Executor, run: Callable[..., Any]) -> ReadyExecutor:
    """An executor with what it has prepared."""
    return ReadyExecutor(executor.name, run, executor.reads_live_weights, executor)


def _plainly(job: Job, gm: nn.Module) -> ReadyExecutor:
    return ready_executor(Plain(), Plain().prepare(gm, *job.arguments))


def _at_any_size(
    job: Job,
    gm: nn.Module,
    wanted: Mapping[str, Executor],
    ready: Mapping[str, Callable[..., Any]],
    comparison: Comparison,
    as_called: AsCalled,
) -> ReadyExecutor:
    """What runs calls of other sizes: the fastest on the mix of sizes, of those that take any; the original where that
    is faster, if only at one of the sizes."""
    open_ones = {name: run for name, run in ready.items() if wanted[name].takes_any_size and name in comparison.timings}
    if not open_ones:
        return _plainly(job, gm)
    fastest = sorted(open_ones, key=lambda name: comparison.timings[name].median)[:_MOST_RACED]
    runs = {name: as_called(wanted[name], open_ones[name]) for name in fastest}
    job.progress("timing at other sizes", 0.93)
    best = _best_on_mix(job, runs, comparison)
    if best == ORIGINAL:
        return ReadyExecutor(ORIGINAL, job.original, True)
    return ready_executor(wanted[best], open_ones[best])


def _best_on_mix(job: Job, runs: dict[str, Callable[..., Any]], at_example: Comparison) -> str:
    """Which of these takes the least time for the whole mix of sizes, and is not slower than the original at any. At
    the example's they have been timed."""
    calls = job.others.calls if job.others is not None else ()
    is_free = job.backend == "auto" and job.effort != "quick"
    if len(runs) < 2 and not is_free:
        return next(iter(runs))
    candidates = runs | ({ORIGINAL: job.original} if is_free else {})
    seconds = _seconds(job) / (1 + len(calls))
    races = [_compare(job, candidates, inputs=call, seconds=seconds, keep=candidates) for call in calls]
    races.append(at_example)
    raced = [name for name in candidates if all(name in race.timings for race in races)]
    if is_free:
        raced = [name for name in raced if not any(_is_slower(race, name) for race in races)]
    return min(raced, key=lambda name: sum(race.timings[name].median for race in races))


def _is_slower(race: Comparison, name: str) -> bool:
    """Whether a way is slower than the original, beyond the noise."""
    return name != ORIGINAL and race.between(ORIGINAL, name).slower


def _executors_for(job: Job) -> tuple[dict[str, Executor], dict[str, str]]:
    """The executors that the job asks for, and why others cannot be used."""
    if job.backend != "auto":
        return {job.backend: available_executor(job.backend, job.device)}, {}
    found = executors(job.device)
    wanted = found if job.only is None else {name: found[name] for name in found if name in job.only}
    return wanted, unavailable(job.device)


def available_executor(name: str, device: torch.device) -> Executor:
    """The executor of that name, if it can be used on this device."""
    executor = executor_named(name)
    reason = why_unavailable(executor, device)
    if reason is not None:
        raise RefoldError(f"the executor {name} cannot be used here: {reason}.")
    return executor


def _prepare(job: Job, wanted: Mapping[str, Executor], module: nn.Module, reference: OutputReference) -> Candidates:
    """Prepare the executors, and check the outputs of each."""
    found, padded = Candidates(), PaddedExample(module, job.inputs, job.rounding)
    dense = with_padding(module) if isinstance(module, GraphModule) else module
    for i, executor in enumerate(most_promising_first(wanted.values(), job.budget.capturing)):
        name = executor.name
        job.progress(f"preparing {name}", 0.9 * i / len(wanted))
        reason = _why_not_now(job, executor, found.ready) if found.ready else None
        if reason is not None:
            found.left_out[name] = reason
            continue
        try:
            graph = module if executor.takes_packed else dense
            prepare = functools.partial(prepare_as_torch, executor, graph, *job.arguments)
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
    if executor.takes_any_size and not executor.takes_packed and job.others is None:
        return "no other sizes than those of the example are prepared for"
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
        if choice.at_any_size is not None and choice.at_any_size.run is choice.run:
            choice.at_any_size = replace(choice.at_any_size, run=found.ready[name])
        choice.run, choice.grades = found.ready[name], choice.grades | found.grades


def _compare(
    job: Job,
    candidates: Mapping[str, Callable[..., Any]],
    keep: Collection[str] = (),
    inputs: CallArguments | None = None,
    seconds: float | None = None,
) -> Comparison:
    """Time a few candidates until one is faster beyond the noise. Two rounds of calls that take seconds decide nothing:
    without a time budget there are as many as it needs."""
    return measure_many(
        candidates,
        inputs or job.inputs,
        time_budget=seconds or _seconds(job),
        at_least=rounds_needed(_CONFIDENCE) if job.budget.seconds is None else 2,
        until_decided=True,
        confidence=_CONFIDENCE,
        memory=False,
        keep=keep,
    )


def _seconds(job: Job) -> float:
    """For one comparison."""
    return max(1.0, job.budget.share(0.5, _MEASURE_SECONDS[job.effort]))
