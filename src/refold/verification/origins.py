"""The tensors that a change made, as exact as float64 gives them, and whether the stored ones are their roundings.

A tensor after a change is one of four: the same as before; made by a weight map, which is computed again in float64;
made by a transformation that can be applied again, to a float64 copy; or of unknown origin, taken as it is stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule

from refold.fx_private import find_tensor, registered_tensors
from refold.record.copies import working_copy
from refold.record.nodes import record_node, same_value
from refold.record.stack import attach, history
from refold.rewrite.transformation import Transformation
from refold.verification.closeness import all_finite, equal
from refold.verification.float64 import SLACK, Arithmetic, sensitivity, to_float64
from refold.verification.sites import same_things
from refold.verification.stages import Stage, float64_copy
from refold.weights import Tensors
from refold.weights.maps import MapRecord
from refold.weights.structural import Constant


@dataclass
class Origins:
    """Where the tensors of one stage's after side come from."""

    stage: Stage
    transformation: Transformation | None = None
    _again: dict[str, torch.Tensor] | None = None
    _checked: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        records = [r for r in self.stage.change.maps if not isinstance(r.map.operation, Constant)]
        self.makers = {name: r for r in records for name in r.map.targets.values()}

    def sort(self, names: Iterable[str], known: Iterable[torch.Tensor]) -> tuple[set[str], set[str]]:
        """Of these tensors of the after side, those that weight maps made and those of unknown origin."""
        mapped: set[str] = set()
        unknown: set[str] = set()
        known = list(known)
        for name in names:
            tensor = find_tensor(self.stage.after, name)
            if tensor is None:
                continue
            if name in self.makers:
                mapped.add(name)
            elif not any(same_things(tensor, k) for k in (find_tensor(self.stage.before, name), *known)):
                unknown.add(name)
        return mapped, unknown

    def defect(self, mapped: Iterable[str]) -> str:
        """What is wrong with the stored tensors that maps made, as a sentence; empty if nothing is."""
        for record in self._records(mapped):
            if id(record) not in self._checked:
                self._checked[id(record)] = self._check(record)
            if self._checked[id(record)]:
                return self._checked[id(record)]
        return ""

    def in_float64(self, mapped: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors that maps made, computed in float64 and not rounded."""
        found: dict[str, torch.Tensor] = {}
        for record in self._records(mapped):
            new = record.map.operation.forward(self._sources(record, float64=True))
            found |= {record.map.targets[role]: to_float64(t) for role, t in new.items()}
        return {name: found[name] for name in mapped if name in found}

    def _records(self, mapped: Iterable[str]) -> Iterable[MapRecord]:
        return {id(self.makers[name]): self.makers[name] for name in mapped}.values()

    def applied_again(self, unknown: set[str]) -> dict[str, torch.Tensor] | None:
        """Tensors of unknown origin as the transformation makes them from float64 weights; None if it cannot say."""
        if self.transformation is None:
            return None
        if self._again is None:
            self._again = _apply_again(self.transformation, self.stage)
        return {name: self._again[name] for name in unknown} if unknown <= self._again.keys() else None

    def gives_the_same(self, unknown: set[str]) -> bool:
        """Whether applying the transformation once more stores the same bits."""
        assert self.transformation is not None
        copy = working_copy(self.stage.before)
        attach(copy, type(history(copy))())
        self.transformation(copy)
        stored = {name: (find_tensor(copy, name), find_tensor(self.stage.after, name)) for name in unknown}
        return all(same_things(again, there) for again, there in stored.values())

    # --- checking stored tensors -------------------------------------------------------------------------------------

    def _sources(self, record: MapRecord, *, float64: bool = False) -> Tensors:
        """What a map reads: tensors of the before side, or what an earlier map of the same change made of them."""
        found = {role: self._before(name, record, float64) for role, name in record.map.sources.items()}
        return {role: tensor for role, tensor in found.items() if tensor is not None}

    def _before(self, name: str, reader: MapRecord, float64: bool) -> torch.Tensor | None:
        maker = self._earlier(name, reader)
        if maker is None:
            tensor = find_tensor(self.stage.before, name)
            return tensor if tensor is None else to_float64(tensor.detach()) if float64 else tensor.detach()
        role = next(role for role, target in maker.map.targets.items() if target == name)
        made = maker.map.operation.forward(self._sources(maker, float64=float64))[role]
        return to_float64(made) if float64 else made.to(maker.target_dtypes[role])

    def _earlier(self, name: str, reader: MapRecord) -> MapRecord | None:
        """The map of the same change that made what another one read."""
        earlier = itertools.takewhile(lambda record: record is not reader, self.stage.change.maps)
        return next((record for record in [*earlier][::-1] if name in record.map.targets.values()), None)

    def _check(self, record: MapRecord) -> str:
        sources = self._sources(record)
        expected = record.map.operation.forward(sources)
        for role, name in record.map.targets.items():
            stored = find_tensor(self.stage.after, name)
            if stored is None:
                return f"{name}, which the weight map {record.map} makes, is not in the module"
            if role not in expected or expected[role].shape != stored.shape:
                return f"{name} has not the shape that its weight map gives it"
            problem = self._problem(record, role, stored.detach(), expected[role], sources)
            if problem:
                return f"{name} {problem}"
        return ""

    def _problem(
        self, record: MapRecord, role: str, stored: torch.Tensor, expected: torch.Tensor, sources: Tensors
    ) -> str:
        rounded = expected.to(stored.dtype)
        if equal(stored, rounded):
            overflows = not all_finite(stored) and all(map(all_finite, sources.values()))
            return f"overflows {stored.dtype}: the folded values are too large for it" if overflows else ""
        if not bool((stored.isfinite() | ~expected.isfinite()).all()):
            return "is not finite where its weight map gives finite values"
        if record.map.operation.structural and not any(self._earlier(n, record) for n in record.map.sources.values()):
            return f"is not what its weight map {record.map} gives"
        return self._beyond_rounding(record, role, stored, sources)

    def _beyond_rounding(self, record: MapRecord, role: str, stored: torch.Tensor, sources: Tensors) -> str:
        """Weights that were trained since are carried back and rounded: they agree to one rounding of the sources."""
        units = [torch.finfo(t.dtype).eps / 2 for t in (*sources.values(), stored) if t.is_floating_point()]

        def run() -> list[torch.Tensor]:
            return [record.map.operation.forward(self._sources(record, float64=True))[role]]

        with Arithmetic():
            exact = run()
        allowed = SLACK * max(units) * sensitivity(run, exact, 0)[0] + max(units) * exact[0].abs()
        distance = (to_float64(stored) - exact[0]).abs()
        if bool((distance <= allowed).all()):
            return ""
        return f"is not what its weight map {record.map} gives: it is off by up to {float(distance.max()):.3g}"


def _apply_again(transformation: Transformation, stage: Stage) -> dict[str, torch.Tensor]:
    """The tensors after applying a transformation to a float64 copy; none where it does something else to that."""
    copy = float64_copy(stage.before)
    assert isinstance(copy, GraphModule)
    try:
        copy = transformation(copy)
    except Exception:  # whatever a transformation of unknown code raises on float64
        return {}
    old, new = [record_node(n) for n in stage.after.graph.nodes], [record_node(n) for n in copy.graph.nodes]
    calls = [[(record.name, record.op, record.target) for record in records] for records in (old, new)]
    return {n: t.detach() for n, t in registered_tensors(copy).items()} if same_value(*calls) else {}
