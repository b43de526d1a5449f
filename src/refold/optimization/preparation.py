"""How one kind of call is prepared for: at first, again when the model has changed, and where it was moved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

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
from refold.record.reversal import undo_below
from refold.record.stack import history


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

    def again(self, prepared: Prepared | None) -> tuple[Prepared, list[str]]:
        """What is prepared for the model as it is now, and what is different from when it was prepared."""
        job, others = self._here()

        def work() -> tuple[Prepared, list[str]]:
            changes = self._changes(job, prepared)
            if prepared is not None and not changes:
                return prepared, []
            if prepared is not None and prepared.graph_module is not None and history(prepared.graph_module):
                undo_below(prepared.graph_module)
            return self.prepare(job if prepared is None else _as_before(job, prepared), others), changes

        return all_or_nothing(job.model, work)

    def plainly(self, kept: Collection[int]) -> Prepared:
        """The plain graph of the model as it is now, with the rewrites of these signatures, in a few seconds."""
        job, others = self._here()
        pipeline = tuple(each for each in job.pipeline if each.signature in kept)
        job = replace(job, pipeline=pipeline, backend=Plain.name, effort="quick", cache=None)
        prepared = replace(all_or_nothing(job.model, lambda: self.prepare(job, others)), is_for_now=True)
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

    def _changes(self, job: Job, prepared: Prepared | None) -> list[str]:
        """What is different in the model: what is checked at every call, and what a capture and the weights' bits
        show."""
        if prepared is None or prepared.is_for_now:
            return ["it was restored, moved or given up"]
        reasons = [reason for way in prepared.ways if (reason := way.watch.why_changed()) is not None]
        captured = self.capture(job)
        before = prepared.inventory
        if before is None or isinstance(captured, str):
            return reasons + ([] if (before is None) == isinstance(captured, str) else ["whether it can be captured"])
        now = Inventory.of(job.model, captured).with_weights(job.model, list(before.tensors))
        return list(dict.fromkeys([*reasons, *before.differences(now)]))


def _as_before(job: Job, prepared: Prepared) -> Job:
    """A job for the executor that was chosen, where it was: then no other is tried."""
    known = prepared.at_example.executor
    is_free = job.backend != "auto" or prepared.is_for_now or known == ORIGINAL
    return job if is_free else replace(job, backend=known)
