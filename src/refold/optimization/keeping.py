"""Keeping what was decided for a job: found under its key, used if it still holds, written for the next process."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from hashlib import sha256
from typing import TypeVar

import torch
from torch import nn
from torch.fx import GraphModule

from refold.call_arguments import CallArguments
from refold.errors import BadDecision, RefoldError, SaveError
from refold.fingerprint import fingerprint
from refold.fx_private import named_tensors
from refold.measurement.timing import Comparison
from refold.optimization.choice import ExecutorChoice
from refold.optimization.compiled_code import compiled_code_in
from refold.optimization.decision import Decision, Rounds, digest_of_graph, plain_steps
from refold.optimization.expectations import is_out_of_time
from refold.optimization.job import Job
from refold.optimization.job_key import JobKey, key_of
from refold.optimization.redoing import Redone, to_race
from refold.record.stack import history
from refold.report.document import Report
from refold.rewrite.replay import steps_of
from refold.wording import first_line

_T = TypeVar("_T")
NOT_USED = "What was decided before was not used"
_LONGEST_WAIT = 600.0  # seconds, for another process that decides the same; at least twice the time budget
_MOST_RACES = 3  # what is level after so many is level
_WORTH_A_RACE = 0.95  # of the time of the chosen one: what may be faster by less is not raced again
_CLOSE = 1.3  # in a race under load, what took up to so many times as long as the winner may be faster
_LOAD = 0.5  # of the cores, when the job began: others were computing


class Keeper:
    """What is kept for one job; `decision` is what was found, and `notes` say why it was of no use."""

    def __init__(self, job: Job, key: JobKey) -> None:
        self.key = key
        self.notes: list[str] = []
        self._job, self._cache = job, job.cache
        self._is_loaded = _is_loaded()
        self.decision = self._found()

    @cached_property
    def weights(self) -> str:
        """A fingerprint of all weights, as they are when it is first asked for."""
        return fingerprint_of_weights(self._job.model)

    def _found(self) -> Decision | None:
        given = self._job.given
        if given is not None:
            differences = [name for name in given.key.differences(self.key) if name != "settings"]
            if not differences:  # it was asked for as its folder says, or prepared again since, on the same terms
                return given
            self.notes.append(f"{NOT_USED}, because it was saved for other {', '.join(differences)}.")
        try:
            text = None if self._cache is None else self._cache.read(self.key.digest)
            found = None if text is None else Decision.from_text(text)
        except OSError:  # writing says why
            return None
        except BadDecision as reason:
            self._put_aside(str(reason))
            return None
        if found is not None and found.key != self.key:
            self._put_aside("it is that of another model")
            return None
        return found

    def _put_aside(self, why: str) -> None:
        self.notes.append(f"{NOT_USED}, because {why.rstrip('.')}. Everything was decided anew.")
        self.decision = None

    def use(self, work: Callable[[Decision, str], _T]) -> _T | None:
        """What some work makes of the decision that was found; None where there is none or it does not hold."""
        if self.decision is None:
            return None
        try:
            return work(self.decision, self.weights)
        except Exception as error:  # whatever a kept decision leads to: without it, all is as if there were none
            self._put_aside(first_line(error))
            return None

    def decide(
        self, captured: str, gm: GraphModule | None, choice: ExecutorChoice, report: Report, raced: Sequence[str] = ()
    ) -> Decision | None:
        """A decision as plain data; None where a rewrite cannot be told as such. `captured` is the digest of the graph
        before its rewrites, and empty where rewrites were in it already; `raced` what was raced again."""
        before = self.decision
        if gm is None or not captured:
            return None
        try:
            steps = plain_steps(steps_of(gm))
        except SaveError as reason:
            self.notes.append(f"The decision is not kept: {first_line(reason)}")
            return None
        races = 1 if before is None else before.races + bool(raced)
        late = [name for name, reason in choice.left_out.items() if is_out_of_time(reason)]
        late += [name for name in (() if before is None else before.untried) if name not in (*late, *raced)]
        goes_on = races < _MOST_RACES and self._job.backend == "auto" and self._job.effort != "quick"
        return Decision(
            self.key,
            "",
            captured,
            digest_of_graph(gm),
            steps,
            choice.name,
            choice.rewrites_hinder and bool(history(gm)),
            None if choice.at_any_size is None else choice.at_any_size.name,
            report,
            self._open_rounds(choice) if goes_on else (),
            tuple(late) if goes_on else (),
            races,
            datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )

    def decided_again(self, decision: Decision, weights: str, found: Redone) -> Decision:
        """The decision after it was used again, kept where anything is new."""
        if found.raced:
            new = self.decide(decision.captured, found.gm, found.choice, found.report, found.raced)
        elif weights == decision.weights:
            return decision
        else:
            steps = plain_steps(steps_of(found.gm))
            new = replace(decision, key=self.key, steps=steps, rewritten=digest_of_graph(found.gm), report=found.report)
        return self.keep(new) or decision

    def _open_rounds(self, choice: ExecutorChoice) -> tuple[Rounds, ...]:
        names = [] if choice.comparison is None else _may_be_faster(choice, choice.comparison, self._is_loaded)
        if choice.comparison is None or not names:
            return ()
        timings = {name: choice.comparison.timings[name].seconds for name in (choice.name, *names)}
        together = min(map(len, timings.values()))
        return tuple(Rounds(name, seconds[:together]) for name, seconds in timings.items())

    def keep(self, decision: Decision | None) -> Decision | None:
        """Write a decision down for the next process. Where that fails, a note says why. The decision, with the
        weights that it was made with."""
        if decision is None or self._cache is None:
            return decision
        decision = decision.with_weights(self.weights)
        try:
            self._cache.write(self.key.digest, decision.to_text())
        except (OSError, ValueError, RefoldError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
            self.notes.append(f"The decision could not be kept: {why.rstrip('.')}.")
        return decision


def _may_be_faster(choice: ExecutorChoice, comparison: Comparison, is_loaded: bool) -> list[str]:
    """The ways that may be faster than the chosen one by so much that it matters, for all that the race can tell."""
    chosen, alive = choice.name, [each for each in comparison.timings.values() if not each.dropped]
    if chosen not in comparison.timings or comparison.timings[chosen].dropped:
        return []
    if is_loaded:
        most = _CLOSE * comparison.timings[chosen].median
        return [each.name for each in alive if each.name != chosen and each.median < most]
    others = [each.name for each in alive if each.name != chosen]
    return [name for name in others if comparison.between(name, chosen).interval[0] < _WORTH_A_RACE]


def _is_loaded() -> bool:
    """Whether other processes compute on this machine now, so that times may be wrong."""
    if not hasattr(os, "getloadavg"):
        return False
    return os.getloadavg()[0] > _LOAD * (os.cpu_count() or 1)


def fingerprint_of_weights(model: nn.Module) -> str:
    """One text for all parameters and buffers of a model, which any change of a bit changes."""
    tensors = named_tensors(model)
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:  # hashing lets other threads run
        marks = list(pool.map(fingerprint, tensors.values()))
    return sha256("\n".join(f"{name} {mark}" for name, mark in zip(tensors, marks, strict=True)).encode()).hexdigest()


@contextmanager
def keeping(job: Job, others: Sequence[CallArguments]) -> Iterator[Keeper]:
    """What is kept for a job; where that leaves something to decide, while no other process decides the same."""
    key, cache = key_of(job, others), job.cache
    found = Keeper(job, key)
    if cache is None:
        yield found
        return
    with compiled_code_in(cache.compiled(key.digest)):
        if found.decision is not None and not to_race(job, found.decision):
            yield found
            return
        seconds = max(_LONGEST_WAIT, 2 * (job.budget.seconds or 0.0))
        waiting = partial(job.progress, "waiting for another process that prepares the same", 0.0)
        with cache.locked(key.digest, seconds, waiting) as had_to_wait:
            if had_to_wait:
                job.budget.restart()
            yield Keeper(job, key) if had_to_wait else found
