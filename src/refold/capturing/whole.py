"""Capturing a model whole: export, raise, assemble, and prove on the example and on other sizes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from refold.capturing.assembling import assemble
from refold.capturing.baked import dtype_reason, mode_reason
from refold.capturing.calling import Calling, bind
from refold.capturing.casting import idle_casts
from refold.capturing.checking import Trials, all_equal, compare, run, try_sizes
from refold.capturing.devices import unpin
from refold.capturing.errors import CaptureError, CaptureMismatch, NeverCapturable
from refold.capturing.explaining import Failure, explain, steered_by_values
from refold.capturing.export import Exported, export, given_shapes, open_shapes, without_dims
from refold.capturing.fast_path import without_fast_path
from refold.capturing.fixed_values import FixedValues
from refold.capturing.known_values import Known, KnownValues
from refold.capturing.lasting import check_what_lasts
from refold.capturing.module import RECORD, Captured, Original, Record
from refold.capturing.packing import check_fast_path
from refold.capturing.raising import raise_modules
from refold.capturing.report import CaptureReport
from refold.capturing.restoring import switched, untouched
from refold.capturing.sizes import SizeRules, rules_of
from refold.capturing.twins import raise_twins
from refold.capturing.unlifting import unlift

Around = Callable[[nn.Module], AbstractContextManager[Any]]


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to export: its name, what to put around the model while it runs, and what it is for."""

    name: str
    around: Around
    fixes_values: bool = False
    """For models whose Python asks for the values of tensors."""
    after_mismatch: bool = False
    """For models that were captured, but gave other results than in a call."""


PLAIN_EXPORT = Way("torch.export", lambda _model: nullcontext())


class NotCaptured(Exception):
    """All ways of one kind failed; carries one failure for each."""

    def __init__(self, failures: Sequence[Failure], cause: BaseException | None, mismatched: bool = False) -> None:
        super().__init__("; ".join(map(str, failures)))
        self.failures = tuple(failures)
        self.cause = cause
        self.mismatched = mismatched


def capture_whole(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic: Any,
    way: Way,
    failures: list[Failure],
    switches: Mapping[str, Any],
) -> Captured:
    """Capture with as many sizes left open as the model allows; raises `NotCaptured` where no attempt stands.

    Every failed attempt is appended to ``failures``.
    """
    with switched(model, switches) as changed:
        calling, leaves = bind(model, args, kwargs, switches)
        work = _Work(model, calling, leaves, way, changed, failures)
        found: Captured | None = None
        for plan in _plans(work, dynamic):
            if found is not None and plan.last_resort:
                break
            captured = work.attempt(plan)
            found = found or captured
            if captured is not None and (not plan.look_further or work.is_final(captured)):
                return captured
            if work.hopeless:
                break
        if found is not None:
            return found
        raise NotCaptured(work.failures, work.cause, work.mismatched)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What to leave open in one attempt, and the example to export with."""

    name: str
    shapes: Any
    example: Sequence[torch.Tensor]
    look_further: bool = True
    last_resort: bool = False


def _plans(work: _Work, dynamic: Any) -> Iterator[_Plan]:
    """The attempts to make, from the most open to the least."""
    leaves = work.leaves
    if dynamic is False:
        yield _Plan("fixed sizes", None, leaves, look_further=False)
    elif dynamic in ("auto", True):
        yield _Plan("all sizes open", open_shapes(leaves, "all"), leaves)
        # some models take a batch of one for a constant
        if not work.way.fixes_values and any(leaf.dim() and leaf.shape[0] == 1 for leaf in leaves):
            doubled = [torch.cat([leaf, leaf]) if leaf.dim() and leaf.shape[0] == 1 else leaf for leaf in leaves]
            yield _Plan("all sizes open, two rows", open_shapes(doubled, "all"), doubled)
        yield _Plan("batch size open", open_shapes(leaves, "batch"), leaves)
        yield _Plan("fixed sizes", None, leaves, look_further=False, last_resort=True)
    elif isinstance(dynamic, (dict, tuple, list)):
        yield _Plan("the given dynamic shapes", given_shapes(work.calling, dynamic), leaves, look_further=False)
    else:
        raise CaptureError(
            f"dynamic={dynamic!r} is not known: use 'auto', False, or torch.export's dynamic shapes as a dict."
        )


class _Work:
    """One model on its way: the attempts so far and why they failed."""

    def __init__(
        self,
        model: nn.Module,
        calling: Calling,
        leaves: list[torch.Tensor],
        way: Way,
        changed: Sequence[str],
        failures: list[Failure],
    ) -> None:
        self.model = model
        self.calling = calling
        self.leaves = leaves
        self.way = way
        self.changed = changed
        self.failures = failures
        self.cause: BaseException | None = None
        self.mismatched = False
        self.hopeless = False

    def attempt(self, plan: _Plan) -> Captured | None:
        try:
            return self._capture(plan)
        except NeverCapturable:
            raise
        except Exception as error:  # whatever a tracer or the model's code raises is a reason to try the next plan
            self.cause = self.cause or error
            self.mismatched |= isinstance(error, CaptureMismatch)
            self.failures.append(explain(f"{self.way.name}, {plan.name}", error))
            # values computed from an open size are known once that size is fixed
            self.hopeless = steered_by_values(error) and not self.way.fixes_values
            return None

    def is_final(self, captured: Captured) -> bool:
        """Whether another attempt could not do better: a batch size is open, or the model itself takes only one."""
        report: CaptureReport = captured.meta[RECORD].report
        if not self.leaves or any(0 in dims for dims in report.dynamic.values()):
            return True
        longer = [torch.cat([leaf, leaf]) if leaf.dim() else leaf for leaf in self.leaves]
        try:
            run(self.model, self.calling, longer)
        except Exception:
            return True
        return False

    def _capture(self, plan: _Plan) -> Captured:
        clock = _Clock()
        exported, values = self._export(plan)
        clock.lap("export")
        plain = unlift(exported, self.calling)
        twins = raise_twins(plain.graph, self.model)
        raised = raise_modules(plain.graph, self.model, split=twins)
        unpinned = unpin(plain.graph)
        captured = assemble(plain.graph, self.model, plain.constants, twins)
        clock.lap("raise")
        rules = rules_of(exported, self.calling.leaf_names(), self.leaves).that_allow(self.leaves)
        known = values.known if values is not None else {}
        trials = prove(self.model, captured, self.calling, self.leaves, rules, self._few(values), known)
        clock.lap("verify")
        rules = rules.pinned(trials.proven)
        report = CaptureReport(
            model=type(self.model).__name__,
            method=self.way.name,
            dynamic={r.name: tuple(d for d, s in enumerate(r.sizes) if isinstance(s, str)) for r in rules.inputs},
            sizes_tried=tuple(trials.tried),
            raised=tuple(raised.modules),
            refused=tuple(raised.refused),
            twins=tuple(twins),
            unread=tuple(unread_tensors(captured, self.model)),
            regions_inlined=plain.regions,
            checks_dropped=plain.checks,
            devices_unpinned=unpinned,
            nodes=len(captured.graph.nodes),
            training=self.model.training,
            notes=(*self._notes(values), *trials.notes),
            left_out=exported.left_out,
            attempts=tuple(map(str, self.failures)),
            seconds=clock.laps,
        )
        attach_record(captured, self.model, self.calling, rules, report, plain.constants)
        captured.meta[RECORD].fixed = FixedValues({i: value for i, value in known.items() if isinstance(i, int)})
        return captured

    def _export(self, plan: _Plan) -> tuple[Exported, KnownValues | None]:
        """Export; where values may be fixed, begin with none and fix those that Python turns out to ask for."""
        known: Known = {}
        makes_indices = False
        while True:
            fixes = self.way.fixes_values
            values = KnownValues(self.model, self.leaves, known, makes_indices) if fixes else None
            try:
                with untouched(self.model), without_fast_path(), idle_casts(self.model), self.way.around(self.model):
                    shapes = without_dims(plan.shapes, known)
                    return export(self.model, self.calling, plan.example, shapes, values), values
            except Exception as error:
                again = values is not None and not makes_indices and (bool(known) or steered_by_values(error))
                if values is None or not (values.needed or again):
                    raise
                makes_indices = makes_indices or not values.needed
                known |= {source: values.real[source].detach().clone() for source in values.needed}

    def _few(self, values: KnownValues | None) -> list[torch.Tensor] | None:
        """The example with equal tokens, where selections were opened; what is fixed stays as it is."""
        if values is None or not values.opened:
            return None
        return [leaf if i in values.known else all_equal(leaf) for i, leaf in enumerate(self.leaves)]

    def _notes(self, values: KnownValues | None) -> list[str]:
        notes = [f"captured with {switch}, put back afterwards" for switch in self.changed]
        if values is not None:
            names = dict(enumerate(self.calling.leaf_names()))
            fixed = [f"the buffer {s}" if isinstance(s, str) else names[s] for s in values.known]
            notes += [f"{name} is fixed to its values at capture: they steer the model's code" for name in fixed]
            notes += list(dict.fromkeys(values.opened))
        return notes


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now


def prove(
    model: nn.Module,
    captured: nn.Module,
    calling: Calling,
    leaves: Sequence[torch.Tensor],
    rules: SizeRules,
    few: Sequence[torch.Tensor] | None = None,
    steering: Collection[Any] = (),
) -> Trials:
    """Compare on the example (a difference throws the graph away), then calls in a row, then other sizes.

    ``few``: another example to compare on, where a selection among many finds only few. ``steering``: the inputs whose
    values must stay as they are.
    """
    outcome = compare(model, captured, calling, leaves)
    if outcome.eager_failed:
        raise CaptureError(f"{type(model).__name__} does not run on the example inputs: {outcome.why}")
    if outcome.why:
        raise CaptureMismatch(f"the captured graph is not the model: {outcome.why}")
    left = outcome.left
    if few is not None:
        outcome = compare(model, captured, calling, few)
        if outcome.why and not outcome.eager_failed:
            raise CaptureMismatch(f"the captured graph is not the model where all inputs are equal: {outcome.why}")
    check_fast_path(model, calling, leaves)
    notes = check_what_lasts(model, captured, calling, leaves, left, steering)
    trials = try_sizes(lambda resized: compare(model, captured, calling, resized), rules, leaves)
    trials.notes.extend(notes)
    return trials


def attach_record(
    captured: Captured,
    model: nn.Module,
    calling: Calling,
    rules: SizeRules,
    report: CaptureReport,
    constants: Mapping[str, Any],
) -> None:
    """Give a captured module what it must know about itself."""
    read = {str(n.target) for n in captured.graph.find_nodes(op="get_attr")}
    captured.meta[RECORD] = Record(
        report=report,
        calling=calling,
        sizes=rules,
        original=Original(model),
        unread=unread_tensors(captured, model),
        dtype_reason=dtype_reason(captured.graph, {k: v for k, v in constants.items() if k in read}),
        mode_reason=mode_reason(captured.graph, model),
    )


def unread_tensors(captured: nn.Module, model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters of the model that the graph never reads, by their own names."""
    kept = {id(p) for p in captured.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) not in kept}
