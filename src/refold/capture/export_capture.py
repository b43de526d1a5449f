"""Capture by one export strategy: export, raise, put together, and prove on the example and on other sizes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from refold.capture.captured import RECORD, Captured, CaptureRecord, Original, record_of
from refold.capture.construction import assemble, follow_input_device
from refold.capture.export_program import (
    Exported,
    export,
    given_shapes,
    is_image,
    open_shapes,
    skip_no_op_casts,
    without_fast_path,
)
from refold.capture.failure import Failure, depends_on_values
from refold.capture.forward_call import ForwardCall
from refold.capture.fused_encoder import check_fast_path
from refold.capture.known_values import Known, KnownValues
from refold.capture.model_state import untouched
from refold.capture.module_calls import Raised, raise_modules
from refold.capture.plain_graph import unlift
from refold.capture.proof import Trials, check_side_effects, compare, has_no_values, prove_shapes, run, try_sizes
from refold.capture.size_rules import SizeRules, rules_of
from refold.capture.specialised import FixedValues, dtype_reason, mode_reason
from refold.capture.summary import CaptureReport
from refold.errors import CaptureError, CaptureMismatch, NeverCapturable

_FIXED, _GIVEN = "fixed sizes", "the given dynamic shapes"
_OF_IMAGES = "all sizes open, those of images as well"


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to export: its name, what to put around the model while it runs, and what it is for."""

    name: str
    around: Callable[[nn.Module], AbstractContextManager[Any]] = lambda _model: nullcontext()
    fixes_values: bool = False
    """For models with data-dependent control flow."""
    after_mismatch: bool = False
    """For models that were captured, but gave other results than in a call."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What to leave open in one attempt, and the example to export with."""

    name: str
    shapes: Any
    example: Sequence[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class _Built:
    """A graph that was exported and put together, but not compared with the model yet."""

    exported: Exported
    values: KnownValues | None
    constants: dict[str, Any]
    raised: Raised
    device_independent: int
    captured: Captured

    @property
    def known(self) -> Known:
        """The inputs and buffers that are fixed to their values."""
        return self.values.known if self.values is not None else {}


@dataclasses.dataclass(frozen=True)
class ExportCapture:
    """Capture of one model by one strategy, with as many sizes left open as the model allows.

    ``changed`` names the switches that were set in the model's configuration. Every failed attempt is appended to
    ``failures``.
    """

    model: nn.Module
    call: ForwardCall
    leaves: list[torch.Tensor]
    strategy: Strategy
    changed: Sequence[str]
    failures: list[Failure]

    def capture(self, dynamic: Any) -> Captured | None:
        """The captured module; None where no attempt succeeded."""
        found: Captured | None = None
        for plan in self._plans(dynamic):
            if found is not None and plan.shapes is None:  # with less left open than in what was found
                break
            captured = self._attempt(plan)
            found = found or captured
            if captured is not None and (plan.shapes is None or self._is_final(captured)):
                return captured
            if captured is None and self._is_hopeless():
                break
        return found

    def _plans(self, dynamic: Any) -> Iterator[_Plan]:
        """The attempts to make, from the most open to the least."""
        leaves = self.leaves
        if dynamic is False:
            yield _Plan(_FIXED, None, leaves)
        elif dynamic in ("auto", "all", True):
            if dynamic == "all" and any(map(is_image, leaves)):
                yield _Plan(_OF_IMAGES, open_shapes(leaves, images=True), leaves)
            yield _Plan("all sizes open", open_shapes(leaves), leaves)
            # some models take a batch of one for a constant
            if not self.strategy.fixes_values and any(leaf.dim() and leaf.shape[0] == 1 for leaf in leaves):
                doubled = [torch.cat([leaf, leaf]) if leaf.dim() and leaf.shape[0] == 1 else leaf for leaf in leaves]
                yield _Plan("all sizes open, two rows", open_shapes(doubled), doubled)
            yield _Plan("batch size open", open_shapes(leaves, batch_only=True), leaves)
            yield _Plan(_FIXED, None, leaves)
        elif isinstance(dynamic, (dict, tuple, list)):
            yield _Plan(_GIVEN, given_shapes(self.call, dynamic), leaves)
        else:
            raise CaptureError(
                f"dynamic={dynamic!r} is not known: use 'auto', 'all', False, or torch.export's dynamic shapes as a "
                f"dict."
            )

    def _attempt(self, plan: _Plan) -> Captured | None:
        try:
            return self._capture(plan)
        except NeverCapturable:
            raise
        except Exception as error:  # whatever a tracer or the model's code raises is a reason to try the next plan
            self.failures.append(Failure(f"{self.strategy.name}, {plan.name}", error))
            return None

    def _is_hopeless(self) -> bool:
        """Whether the next plan would fail as the last one did: on a value that is no size."""
        return depends_on_values(self.failures[-1].error) and not self.strategy.fixes_values

    def _is_final(self, captured: Captured) -> bool:
        """Whether another attempt could not do better: a batch size is open, or the model itself takes only one."""
        if any(0 in dims for dims in record_of(captured).report.dynamic.values()):
            return True
        longer = [torch.cat([leaf, leaf]) if leaf.dim() else leaf for leaf in self.leaves]
        try:
            run(self.model, self.call, longer)
        except Exception:
            return True
        return False

    def _capture(self, plan: _Plan) -> Captured:
        begun = time.perf_counter()
        exported, values = self._export(plan)
        did_export = time.perf_counter()
        built = self._build(exported, values)
        did_raise = time.perf_counter()
        rules = rules_of(exported, self.call.leaf_names(), self.leaves, self._why_closed(plan)).that_allow(self.leaves)
        trials, notes = self._prove(built, rules)
        verified = time.perf_counter()
        seconds = {"export": did_export - begun, "raise": did_raise - did_export, "verify": verified - did_raise}
        self._record(built, trials, notes, seconds)
        return built.captured

    def _why_closed(self, plan: _Plan) -> str:
        """Why sizes that this attempt did not leave open are fixed."""
        if plan.name == _GIVEN:
            return "the given dynamic shapes fix it"
        if plan.name == _OF_IMAGES:
            return "the model fixes it"
        if plan.shapes == open_shapes(plan.example):
            return "heights and widths of images are open where dynamic='all' or dynamic shapes say so"
        return f"with more sizes left open, {self.failures[-1]}" if self.failures else "dynamic=False fixes all sizes"

    def _export(self, plan: _Plan) -> tuple[Exported, KnownValues | None]:
        """Export; where values may be fixed, begin with none and fix those that Python turns out to read."""
        known: Known = {}
        makes_indices = False
        while True:
            fixes = self.strategy.fixes_values
            values = KnownValues(self.model, self.leaves, known, makes_indices) if fixes else None
            around = self.strategy.around(self.model)
            try:
                with untouched(self.model), without_fast_path(), skip_no_op_casts(self.model), around:
                    shapes = [None if i in known else shape for i, shape in enumerate(plan.shapes or ())]
                    return export(self.model, self.call, plan.example, tuple(shapes), values), values
            except Exception as error:
                again = values is not None and not makes_indices and (bool(known) or depends_on_values(error))
                if values is None or not (values.needed or again):
                    raise
                makes_indices = makes_indices or not values.needed
                known |= {source: values.real[source].detach().clone() for source in values.needed}

    def _build(self, exported: Exported, values: KnownValues | None) -> _Built:
        graph, constants = unlift(exported, self.call)
        raised = raise_modules(graph, self.model)
        device_independent = follow_input_device(graph)
        captured = assemble(graph, self.model, constants, raised.split)
        return _Built(exported, values, constants, raised, device_independent, captured)

    def _prove(self, built: _Built, rules: SizeRules) -> tuple[Trials, list[str]]:
        """Compare on the example (a difference throws the graph away), then calls in a row, then other sizes."""
        model, captured, leaves = self.model, built.captured, self.leaves
        if has_no_values(model):
            return prove_shapes(model, captured, self.call, leaves, rules)
        outcome = compare(model, captured, self.call, leaves)
        if outcome.eager_failed:
            raise CaptureError(f"{type(model).__name__} does not run on the example inputs: {outcome.why}")
        if outcome.why:
            raise CaptureMismatch(f"the captured graph is not the model: {outcome.why}")
        if built.values is not None and built.values.opened:  # a selection among many finds only few here
            equal = [leaf if i in built.known else _all_equal(leaf) for i, leaf in enumerate(leaves)]
            other = compare(model, captured, self.call, equal)
            if other.why and not other.eager_failed:
                raise CaptureMismatch(f"the captured graph is not the model where all inputs are equal: {other.why}")
        check_fast_path(model, self.call, leaves)
        notes = check_side_effects(model, captured, self.call, leaves, outcome.effects, built.known)
        trials = try_sizes(lambda resized: compare(model, captured, self.call, resized), rules, leaves)
        return trials, notes

    def _record(self, built: _Built, trials: Trials, notes: Sequence[str], seconds: dict[str, float]) -> None:
        """Give the captured module what it must know about itself."""
        captured, graph = built.captured, built.captured.graph
        kept = {id(p) for p in captured.parameters()}
        unread: dict[str, torch.Tensor] = {name: p for name, p in self.model.named_parameters() if id(p) not in kept}
        read = {str(n.target) for n in graph.find_nodes(op="get_attr")}
        captured.meta[RECORD] = CaptureRecord(
            report=self._report(built, trials, notes, unread, seconds),
            call=self.call,
            sizes=trials.rules,
            original=Original(self.model),
            unread=unread,
            dtype_reason=dtype_reason(graph, {k: v for k, v in built.constants.items() if k in read}),
            mode_reason=mode_reason(graph, self.model),
            fixed=FixedValues({i: value for i, value in built.known.items() if isinstance(i, int)}),
        )

    def _report(
        self,
        built: _Built,
        trials: Trials,
        notes: Sequence[str],
        unread: Collection[str],
        seconds: dict[str, float],
    ) -> CaptureReport:
        return CaptureReport(
            model=type(self.model).__name__,
            method=self.strategy.name,
            nodes=len(built.captured.graph.nodes),
            training=self.model.training,
            seconds=seconds,
            dynamic=trials.rules.open_dims(),
            sizes=tuple(trials.rules.described()),
            sizes_tried=tuple(trials.tried),
            raised=tuple(built.raised.modules),
            refused=tuple(built.raised.refused),
            split=tuple(built.raised.split),
            unread=tuple(unread),
            device_independent=built.device_independent,
            notes=(*self._notes(built), *notes),
            attempts=tuple(map(str, self.failures)),
            left_out=built.exported.left_out,
        )

    def _notes(self, built: _Built) -> list[str]:
        notes = [f"captured with {switch}, put back afterwards" for switch in self.changed]
        names = dict(enumerate(self.call.leaf_names()))
        fixed = [f"the buffer {s}" if isinstance(s, str) else names[s] for s in built.known]
        notes += [
            f"{name} is fixed to its values at capture: the model's control flow depends on them" for name in fixed
        ]
        return notes + list(dict.fromkeys(built.values.opened if built.values is not None else ()))


def _all_equal(leaf: torch.Tensor) -> torch.Tensor:
    """An input with the same value everywhere (tokens) or in every row (anything else that is no description)."""
    if leaf.dim() < 2 or not leaf.numel():
        return leaf
    one = leaf[:1] if leaf.is_floating_point() else leaf.flatten()[0]
    return one.expand(leaf.shape).contiguous()
