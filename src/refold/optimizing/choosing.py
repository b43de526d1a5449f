"""The fastest correct way to run a module here: every executor prepared, its outputs checked, all timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from refold.errors import RefoldError
from refold.executors import Executor, Plain, PreparationFailed, executor_named, executors, unavailable
from refold.executors.base import why_unavailable
from refold.executors.tree import tensors_of
from refold.measure import Comparison, Measurement, measure_many, rounds_needed
from refold.optimizing.budget import Budget
from refold.optimizing.calls import Inputs, split
from refold.optimizing.padding import ForMasksOfOnes, PaddedExample
from refold.optimizing.progress import silent
from refold.verify import OutputReference

ORIGINAL = "original"
_MEASURE_SECONDS = 10.0
_CONFIDENCE = 0.95
_REWRITTEN = "rewritten"


@dataclass
class Choice:
    """Which executor was chosen, how all of them did, and why others were left out."""

    name: str
    run: Callable[..., Any]
    follows_weights: bool
    comparison: Comparison | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    grades: dict[str, str] = field(default_factory=dict)
    rewriting: Measurement | None = None
    """The chosen executor without the rewrites, against itself with them."""

    @property
    def notes(self) -> list[str]:
        """What is to be known about the way to run the model."""
        return [str(self.run)] if isinstance(self.run, ForMasksOfOnes) else []

    @property
    def rewrites_hinder(self) -> bool:
        """Whether the chosen executor runs the model as fast without the rewrites: then that is what `run` does. No
        doubt in their favour here: without them, the model runs as anybody would run it by hand. Where there was no
        time for rounds that can decide, the median does."""
        if self.rewriting is None:
            return False
        undecidable = len(self.rewriting.ratios) < rounds_needed(_CONFIDENCE)
        return self.rewriting.ratio < 1 if undecidable else not self.rewriting.faster


def choose(
    original: nn.Module,
    module: nn.Module,
    inputs: Inputs,
    *,
    untouched: nn.Module | None,
    backend: str,
    device: torch.device,
    reference: OutputReference,
    level: str,
    budget: Budget,
    tell: Callable[[str, float], None],
    as_called: Callable[[Executor, Callable[..., Any]], Callable[..., Any]],
) -> Choice:
    """Prepare, check and time the executors; the fastest correct one wins. Rewrites are measured as plain graphs, and
    an engine with rewrites of its own may do better without: the winner is tried on the `untouched` graph as well.
    `as_called` gives a way to run the module with all that a call of the optimized model does around it: that is timed,
    since it costs engines that compute in other threads more than others."""
    wanted = executors(device) if backend == "auto" else {backend: available_executor(backend, device)}
    left_out = unavailable(device) if backend == "auto" else {}
    ready, grades = prepare_checked(wanted, module, inputs, reference, level, budget, tell, left_out)
    if not ready and backend != "auto":
        raise RefoldError(f"the executor {backend} cannot run this model: {left_out[backend]}")
    tell("timing the executors", 0.9)
    contenders: dict[str, Callable[..., Any]] = {ORIGINAL: original}
    contenders |= {name: as_called(wanted[name], run) for name, run in ready.items()}
    seconds = max(1.0, budget.share(0.5, _MEASURE_SECONDS))
    comparison = measure_many(
        contenders, inputs, time_budget=seconds, baseline=ORIGINAL, keep=[ORIGINAL], until_decided=True
    )
    left_out |= comparison.failed
    name = backend
    if backend == "auto":
        comparison, name = _winner(comparison, contenders, inputs, budget)
    follows = name == ORIGINAL or wanted[name].follows_weights
    choice = Choice(name, ready.get(name, original), follows, comparison, left_out, grades)
    if untouched is not None and name not in (ORIGINAL, Plain.name):
        tell(f"timing {name} without the rewrites", 0.95)
        _try_without_rewrites(choice, wanted[name], untouched, inputs, reference, level, budget)
    return choice


def _winner(
    comparison: Comparison, contenders: Mapping[str, Callable[..., Any]], inputs: Inputs, budget: Budget
) -> tuple[Comparison, str]:
    """The fastest; those that are level with it are timed once more among themselves, where the rounds are not spent on
    anybody else, and all their rounds count. Also the comparison with these rounds."""
    level = comparison.undecided
    if len(level) < 2 or budget.left <= 0:
        return comparison, comparison.best
    pool = {name: contenders[name] for name in level}
    seconds = max(1.0, budget.share(0.5, _MEASURE_SECONDS))
    again = measure_many(
        pool, inputs, time_budget=seconds, at_least=_fewest_rounds(budget), until_decided=True, memory=False
    )
    together = comparison.followed_by(again)
    return together, together.among(again.timings).best


def _try_without_rewrites(
    choice: Choice,
    executor: Executor,
    untouched: nn.Module,
    inputs: Inputs,
    reference: OutputReference,
    level: str,
    budget: Budget,
) -> None:
    if not budget.is_enough_to_prepare:
        return
    name = choice.name
    ready, grades = prepare_checked({name: executor}, untouched, inputs, reference, level, budget, silent, {})
    if name not in ready or budget.left <= 0:
        return
    choice.rewriting = duel((name, ready[name]), (_REWRITTEN, choice.run), inputs, budget)
    if choice.rewrites_hinder:
        choice.run, choice.grades = ready[name], choice.grades | grades


def duel(
    a: tuple[str, Callable[..., Any]],
    b: tuple[str, Callable[..., Any]],
    inputs: Inputs,
    budget: Budget,
    most_seconds: float = _MEASURE_SECONDS,
) -> Measurement | None:
    """Two named ways to run a model, raced until one is faster beyond the noise; None if one of them fails."""
    pair = dict((a, b))
    raced = measure_many(
        pair,
        inputs,
        time_budget=max(1.0, budget.share(0.5, most_seconds)),
        at_least=_fewest_rounds(budget),
        until_decided=True,
        confidence=_CONFIDENCE,
        memory=False,
        keep=pair,
    )
    return None if raced.failed else raced.between(a[0], b[0])


def _fewest_rounds(budget: Budget) -> int:
    """Two rounds of calls that take seconds decide nothing: without a time budget there are as many as it needs."""
    return rounds_needed(_CONFIDENCE) if budget.seconds is None else 2


def _why_not_now(executor: Executor, ready: Collection[str], level: str, budget: Budget) -> str | None:
    """Why there is no time for an executor."""
    if not budget.is_enough_to_prepare:
        return "the time budget was spent"
    if level == "max":
        return None
    if executor.takes_minutes:
        return "preparing it takes minutes; level='max' tries it"
    if executor.superseded_by in ready:
        return f"{executor.superseded_by} is usually as fast or faster; level='max' tries both"
    return None


def available_executor(name: str, device: torch.device) -> Executor:
    """The executor of that name, if it can be used on this device."""
    executor = executor_named(name)
    reason = why_unavailable(executor, device)
    if reason is not None:
        raise RefoldError(f"the executor {name} cannot be used here: {reason}.")
    return executor


def prepare_checked(
    wanted: Mapping[str, Executor],
    module: nn.Module,
    inputs: Inputs,
    reference: OutputReference,
    level: str,
    budget: Budget,
    tell: Callable[[str, float], None],
    left_out: dict[str, str],
) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """The executors that can run a module and whose outputs are right, and the grade of each; `left_out` is told why
    the others cannot. A copy of the weights that is right without padding only is used for just that."""
    args, kwargs = split(inputs)
    padded = PaddedExample(module, inputs)
    ready: dict[str, Callable[..., Any]] = {}
    grades: dict[str, str] = {}
    for i, (name, executor) in enumerate(wanted.items()):
        tell(f"preparing {name}", 0.9 * i / len(wanted))
        reason = _why_not_now(executor, ready, level, budget)
        if ready and reason is not None:
            left_out[name] = reason
            continue
        try:
            run = executor.prepare(module, args, kwargs)
            with torch.no_grad():
                output = run(*args, **kwargs)
                _refuse_layouts(output)
                grade = reference.grade(output)
        except Exception as error:  # whatever an engine raises, it is not the way to run this model
            left_out[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
            continue
        grades[name] = grade.grade
        if not grade.acceptable or (level == "safe" and grade.grade != "bit-identical"):
            left_out[name] = f"its outputs are {grade.grade}"
            continue
        objection = padded.objection(run)
        if objection is not None and executor.follows_weights:
            left_out[name] = f"its outputs are wrong where the mask is not all ones: {objection}"
            continue
        ready[name] = run if objection is None else padded.left_to_the_module(run, objection)
    return ready, grades


def _refuse_layouts(output: Any) -> None:
    for tensor in tensors_of(output):
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise PreparationFailed(f"An output is a {kind} tensor, which cannot be compared with the model's.")
