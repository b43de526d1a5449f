"""How one kind of call is prepared for: at first, again when the model has changed, and where it was moved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import GraphModule

from refold.call_arguments import CallArguments
from refold.capture.model_state import all_or_nothing
from refold.errors import RefoldError
from refold.executors import Plain
from refold.optimization.budget import Budget
from refold.optimization.choice import ORIGINAL
from refold.optimization.default_pipeline import default_pipeline, usual_for
from refold.optimization.inventory import Inventory
from refold.optimization.job import Job
from refold.optimization.place import Place
from refold.optimization.prepared import Prepared
from refold.optimization.surroundings import Surroundings
from refold.optimization.watch import WEIGHTS_CHANGED


@dataclass(frozen=True)
class Preparation:
    """A job with the calls of other sizes that were given with it, and the stages that do it."""

    job: Job
    others: Sequence[CallArguments]
    place: Place
    """Where the model was when the calls were given."""
    seconds: float | None
    """The time budget that was asked for."""
    is_usual: bool
    """Whether the transformations are those that are usual where the model is."""
    prepare: Callable[[Job, Sequence[CallArguments]], Prepared]
    capture: Callable[[Job], GraphModule | str]

    surroundings: Surroundings = field(default_factory=Surroundings.now)
    """What was switched on around the call."""

    def for_calls(self, calls: Sequence[CallArguments]) -> Preparation:
        """The same for calls of another kind, given where the model is now and with what is switched on now."""
        first, *others = calls
        job = replace(self.job, inputs=first)
        return replace(self, job=job, others=others, place=Place.of(job.model), surroundings=Surroundings.now())

    def first(self) -> Prepared:
        """What is prepared at first, with everything that is tried."""
        return self._prepared(self.job, self.others)

    def anew(self, before: Prepared | None) -> Prepared:
        """What is prepared for the model as it is now, by the executors that were chosen before."""
        job, others = self._here()
        return self._prepared(job if before is None else _with_known_executors(job, before), others)

    def with_other_weights(self, before: Prepared) -> Prepared:
        """The same made again for other weights: the rewrites that were kept, and nothing is measured."""
        job, others = self._here()
        kept = tuple(each for each in job.pipeline if each.signature in before.rewrites)
        return self._prepared(
            replace(_with_known_executors(job, before), pipeline=kept, effort="quick", cache=None), others
        )

    def like(self, first: Prepared) -> Prepared:
        """What is prepared for calls of another kind than the first: by the executors that were chosen for that, and
        without the rewrites that were reverted there. Where there is nothing to go by, everything is tried."""
        job, others = self._here()
        job = _with_known_executors(job, first)
        if job.known:
            reverted = {step.signature for step in first.report.steps if step.status == "taken back"}
            pipeline = tuple(each for each in job.pipeline if str(each.signature) not in reverted)
            job = replace(job, pipeline=pipeline, effort="quick")
        return self._prepared(job, others)

    def _prepared(self, job: Job, others: Sequence[CallArguments]) -> Prepared:
        with self.surroundings.entered():
            return self.prepare(job, others)

    def plainly(self, kept: Collection[int]) -> Prepared:
        """The plain graph of the model as it is now, with the rewrites of these signatures, in a few seconds."""
        job, others = self._here()
        pipeline = tuple(each for each in job.pipeline if each.signature in kept)
        job = replace(job, pipeline=pipeline, backend=Plain.name, effort="quick", cache=None)
        prepared = replace(all_or_nothing(job.model, lambda: self._prepared(job, others)), is_for_now=True)
        if prepared.graph_module is None:
            raise RefoldError(" ".join(prepared.report.notes))
        return prepared

    def _here(self) -> tuple[Job, list[CallArguments]]:
        """The job and the other calls, for the model where it is now."""
        job, now = self.job, Place.of(self.job.model)
        inputs, *others = (self.place.carry(call, now) for call in (job.inputs, *self.others))
        device = inputs.device(job.model)
        usual = self.seconds is None
        budget = Budget.usual(job.model, device, job.effort) if usual else Budget(self.seconds)
        pipeline = usual_for(default_pipeline(job.level), device, job.effort) if self.is_usual else job.pipeline
        return replace(job, inputs=inputs, budget=budget, pipeline=pipeline), others

    def changes(self, prepared: Prepared | None) -> list[str]:
        """What is different in the model: what is checked at every call, and what a capture and the weights' bits
        show. Where weights were changed in place, that is enough to know."""
        if prepared is None or prepared.is_for_now:
            return ["it was restored, moved or given up"]
        reasons = prepared.reasons()
        if reasons == [WEIGHTS_CHANGED]:
            return reasons
        job, _ = self._here()
        with self.surroundings.entered():
            captured = self.capture(job)
        before = prepared.inventory
        if before is None or isinstance(captured, str):
            return reasons + ([] if (before is None) == isinstance(captured, str) else ["whether it can be captured"])
        now = Inventory.of(job.model, captured).with_weights(job.model, list(before.tensors))
        return list(dict.fromkeys([*reasons, *before.differences(now)]))


def _with_known_executors(job: Job, prepared: Prepared) -> Job:
    """A job for the executors that were chosen, where they were: then no others are tried."""
    ways = (prepared.at_example, prepared.at_any_size or prepared.at_example)
    names = tuple(dict.fromkeys(way.executor for way in ways))
    return job if prepared.is_for_now or names[0] == ORIGINAL else replace(job, known=names, cache=None)
