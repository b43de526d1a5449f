"""A decision used again: its rewrites made at the same places, its ways to run prepared, all compared with the model.

With the same weights the sites are not verified again: they were, on these very weights. With others they are, and the
outputs are graded against float64. What a decision left open is raced again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from refold.call_arguments import CallArguments
from refold.capture.exclusive import alone
from refold.errors import BadDecision
from refold.executors import Executor, Plain, executors
from refold.executors.meaning import prepare_as_torch
from refold.nested import same_leaves
from refold.optimization.choice import ORIGINAL, ExecutorChoice, ReadyExecutor, available_executor, ready_executor
from refold.optimization.decision import Decision, digest_of_graph
from refold.optimization.expectations import expected_of, why_not_in_time
from refold.optimization.job import Job
from refold.optimization.report_building import build_report
from refold.optimization.sizes import OtherSizes
from refold.optimization.steps import Rewritten, rewrite
from refold.record.copies import shared_copy
from refold.report.document import Report
from refold.rewrite.replay import replay
from refold.verification.accuracy import OutputReference

Choose = Callable[[Job, Rewritten], tuple[Rewritten, ExecutorChoice]]


@dataclass(frozen=True)
class Redone:
    """What a decision gave when it was used again."""

    gm: GraphModule
    choice: ExecutorChoice
    report: Report
    raced: tuple[str, ...] = ()
    """What was raced again."""

    def sentence(self, decision: Decision) -> str:
        """For the report."""
        if self.raced:
            return f"What was left open on {decision.created} was raced again, on {', '.join(self.raced)}."
        return f"As decided on {decision.created}; the graph and the ways to run it were compared with the model again."


def redo(
    job: Job,
    captured: GraphModule,
    calls: Sequence[CallArguments] | None,
    decision: Decision,
    weights: str,
    choose: Choose,
) -> Redone:
    """Use a decision for a graph that was just captured, in place; `BadDecision` says why it cannot be. `calls` are
    such of other sizes that the graph takes."""
    if digest_of_graph(captured) != decision.captured:
        raise BadDecision("the graph of the model is another one")
    raced, drawn = to_race(job, decision), () if decision.at_any_size is None or calls is None else calls
    if not raced and weights == decision.weights:
        unrewritten = _replay(job, captured, decision)
        trial = _Trial(job, drawn, None)
        trial.check(captured, "the rewritten graph")
        return Redone(captured, _prepared_as_decided(job, captured, unrewritten, decision, trial), decision.report)
    rewritten = _rewritten_again(job, captured, decision)
    trial = _Trial(job, drawn, rewritten.reference)
    trial.check(captured, "the rewritten graph")
    if raced:
        rewritten, choice = choose(replace(job, only=raced, earlier=decision.comparison()), rewritten)
    else:
        choice = _prepared_as_decided(job, captured, rewritten.unrewritten or captured, decision, trial)
    return Redone(captured, choice, _report(job, rewritten, choice, decision, bool(raced)), raced)


def _report(job: Job, rewritten: Rewritten, choice: ExecutorChoice, decision: Decision, is_raced: bool) -> Report:
    """What was found at first, with the rewrites as they were verified now, and with the times of a new race."""
    before, now = decision.report, build_report(job.model, rewritten, choice, [])
    places = {card.signature: place for place, card in enumerate(before.steps)}
    cards = {card.signature: card for card in now.steps}
    numbers = [places[card.signature] for card in now.steps]
    links = tuple(replace(link, steps=tuple(numbers[step] for step in link.steps)) for link in now.links)
    steps = tuple(cards.get(card.signature, card) for card in before.steps)
    found = replace(before, steps=steps, exactness=now.exactness, links=links)
    found = replace(found, graph_before=now.graph_before, graph_after=now.graph_after)
    if not is_raced:
        return found
    names = {row.name for row in now.executors}
    executors = (*now.executors, *(row for row in before.executors if row.name not in names))
    return replace(found, speedup=now.speedup, timings=now.timings, executors=executors, created=now.created)


# --- what is open --------------------------------------------------------------------------------------------------


def to_race(job: Job, decision: Decision) -> tuple[str, ...]:
    """The executors to prepare and to time again: none where the decision is settled, or where there is no time."""
    if job.effort == "quick" or decision.is_settled:
        return ()
    known = executors(job.device)
    level = [each.name for each in decision.rounds]
    late = [name for name in decision.untried if name in known and _is_worth_trying(job, decision, known[name])]
    if not level and not late:
        return ()
    chosen = (decision.at_example, decision.at_any_size, Plain.name)
    return tuple(dict.fromkeys(name for name in (*level, *late, *chosen) if name in known))


def _is_worth_trying(job: Job, decision: Decision, executor: Executor) -> bool:
    """Whether there is time for an executor now, and it is expected to be faster than what was found."""
    seconds = {bar.name: bar.median for bar in decision.report.timings}
    plain, best = seconds.get(Plain.name), seconds.get(decision.at_example)
    gain = plain / best if plain and best else 1.0
    return why_not_in_time(executor, job.budget) is None and expected_of(executor).gain > gain


# --- the rewrites --------------------------------------------------------------------------------------------------


def _replay(job: Job, captured: GraphModule, decision: Decision) -> GraphModule:
    """Make the same rewrites at the same places; the graph without them."""
    unrewritten = shared_copy(captured)
    job.progress("making the rewrites", 0.3)
    alone(lambda: replay(captured, decision.steps))
    if digest_of_graph(captured) != decision.rewritten:
        raise BadDecision("its rewrites give another graph")
    return unrewritten


def _rewritten_again(job: Job, captured: GraphModule, decision: Decision) -> Rewritten:
    """The same rewrites, verified as at first. They are not measured again."""
    kept = {step.get("signature") for step in decision.steps}
    pipeline = tuple(each for each in job.pipeline if each.signature in kept)
    return rewrite(replace(job.part(0.1, 0.5), pipeline=pipeline, effort="quick"), captured)


# --- the ways to run -----------------------------------------------------------------------------------------------


class _Trial:
    """The example and a drawn call, run by the model, with which everything is compared before it is used. With a
    reference (for weights that are new) outputs are graded, too, and the example is tried with padding."""

    def __init__(self, job: Job, calls: Sequence[CallArguments], reference: OutputReference | None) -> None:
        model = job.original if job.outputs is None else job.outputs.called(job.original)
        self._job, self._model, self._reference = job, model, reference
        is_padded = reference is not None
        try:
            self._all = OtherSizes(model, (job.inputs, *calls[:1]), job.rounding, padded=is_padded)
        except Exception:  # the model itself does not take the drawn call
            self._all = OtherSizes(model, (job.inputs,), job.rounding, padded=is_padded)

    def check(self, run: Callable[..., Any], what: str, *, at_example: bool = False) -> None:
        """Refuse what is not the model; `at_example` says that it takes the example's sizes alone."""
        objection = self._all.objection(run, 1 if at_example else None)
        if objection is None and self._reference is not None:
            graded = self._reference.grade(self._job.call(run))
            objection = None if graded.acceptable else f"its outputs are {graded.grade}"
        if objection is None and self._job.level == "safe":
            same = same_leaves(self._job.call(self._model), self._job.call(run))
            objection = None if same else "its outputs are not bit-identical"
        if objection is not None:
            raise BadDecision(f"{what} is not the model {objection}")


def _prepared_as_decided(
    job: Job, gm: GraphModule, unrewritten: GraphModule, decision: Decision, trial: _Trial
) -> ExecutorChoice:
    name = decision.at_example
    executor = None if name == ORIGINAL else available_executor(name, job.device)
    job.progress(f"preparing {name}", 0.6)
    run: Callable[..., Any] = job.original
    if executor is not None:
        module = unrewritten if decision.runs_unrewritten else gm
        run = prepare_as_torch(executor, module, *job.arguments)
        if name != Plain.name or decision.runs_unrewritten:  # else it runs the graph itself
            trial.check(run, name, at_example=not executor.takes_any_size)
    choice = ExecutorChoice(name, run, executor is None or executor.reads_live_weights)
    if decision.at_any_size == ORIGINAL:
        choice.at_any_size = ReadyExecutor(ORIGINAL, job.original, True)
    elif decision.at_any_size is not None:
        other = available_executor(decision.at_any_size, job.device)
        is_same = decision.at_any_size == name and not decision.runs_unrewritten
        choice.at_any_size = ready_executor(other, run if is_same else _prepared_for_any_size(job, gm, other, trial))
    return choice


def _prepared_for_any_size(job: Job, gm: GraphModule, executor: Executor, trial: _Trial) -> Callable[..., Any]:
    if not executor.takes_any_size:
        raise BadDecision(f"{executor.name} does not take any size")
    run = prepare_as_torch(executor, gm, *job.arguments)
    if executor.name != Plain.name:
        trial.check(run, executor.name)
    return run
