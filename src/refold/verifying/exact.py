"""The tensors that a change made, as exact as float64 gives them, and whether the stored ones are their roundings.

A tensor after a change is one of four: the same as before; made by a weight map, which is computed again in float64;
made by a transformation that can be applied again, to a float64 copy; or of unknown origin, taken as it is stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule

from refold.history import attach, find_tensor, history
from refold.operations.constant import Constant
from refold.snapshot import record_node, same_value
from refold.transformation import Transformation
from refold.verifying.arithmetic import SLACK, Arithmetic, spread, widen
from refold.verifying.comparing import all_finite
from refold.verifying.sites import same_things
from refold.verifying.stages import Stage, wide_copy, working_copy
from refold.weights import MapRecord, Tensors


@dataclass
class Origins:
    """Where the tensors of one stage's after side come from."""

    stage: Stage
    transformation: Transformation | None = None
    _again: dict[str, torch.Tensor] | str | None = None
    _checked: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        records = [r for r in self.stage.change.maps if not isinstance(r.map.operation, Constant)]
        self.makers = {name: r for r in records for name in r.map.targets.values()}

    def sort(self, names: Iterable[str], known: Iterable[torch.Tensor]) -> tuple[set[str], set[str]]:
        """Of these tensors of the after side, those that weight maps made and those of unknown origin."""
        mapped: set[str] = set()
        fresh: set[str] = set()
        known = list(known)
        for name in names:
            tensor = find_tensor(self.stage.after, name)
            if tensor is None:
                continue
            if name in self.makers:
                mapped.add(name)
            elif not self._was_there(name, tensor) and not any(same_things(tensor, k) for k in known):
                fresh.add(name)
        return mapped, fresh

    def _was_there(self, name: str, tensor: torch.Tensor) -> bool:
        old = find_tensor(self.stage.before, name)
        return old is not None and same_things(old, tensor)

    def defect(self, mapped: Iterable[str]) -> str:
        """What is wrong with the stored tensors that maps made, as a sentence; empty if nothing is."""
        for record in {id(self.makers[name]): self.makers[name] for name in mapped}.values():
            if id(record) not in self._checked:
                self._checked[id(record)] = self._check(record)
            if self._checked[id(record)]:
                return self._checked[id(record)]
        return ""

    def wide(self, mapped: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors that maps made, computed in float64 and not rounded."""
        found: dict[str, torch.Tensor] = {}
        for record in {id(self.makers[name]): self.makers[name] for name in mapped}.values():
            new = record.map.operation.forward(self._sources(record, wide=True))
            found |= {record.map.targets[role]: widen(t) for role, t in new.items()}
        return {name: found[name] for name in mapped if name in found}

    def applied_again(self, fresh: set[str]) -> dict[str, torch.Tensor] | None:
        """Tensors of unknown origin as the transformation makes them from float64 weights; None if it cannot say."""
        if self.transformation is None:
            return None
        if self._again is None:
            self._again = _apply_again(self.transformation, self.stage)
        if isinstance(self._again, str) or not fresh <= self._again.keys():
            return None
        return {name: self._again[name] for name in fresh}

    def gives_the_same(self, fresh: set[str]) -> bool:
        """Whether applying the transformation once more stores the same bits."""
        assert self.transformation is not None
        twin = working_copy(self.stage.before)
        attach(twin, type(history(twin))())
        self.transformation(twin)
        stored = {name: (find_tensor(twin, name), find_tensor(self.stage.after, name)) for name in fresh}
        return all(same_things(again, there) for again, there in stored.values())

    # --- checking stored tensors -------------------------------------------------------------------------------------

    def _sources(self, record: MapRecord, *, wide: bool = False) -> Tensors:
        """What a map reads: tensors of the before side, or what an earlier map of the same change made of them."""
        found = {role: self._before(name, record, wide) for role, name in record.map.sources.items()}
        return {role: tensor for role, tensor in found.items() if tensor is not None}

    def _before(self, name: str, reader: MapRecord, wide: bool) -> torch.Tensor | None:
        maker = self._earlier(name, reader)
        if maker is None:
            tensor = find_tensor(self.stage.before, name)
            return tensor if tensor is None else widen(tensor.detach()) if wide else tensor.detach()
        role = next(role for role, target in maker.map.targets.items() if target == name)
        made = maker.map.operation.forward(self._sources(maker, wide=wide))[role]
        return widen(made) if wide else made.to(maker.target_dtypes[role])

    def _earlier(self, name: str, reader: MapRecord) -> MapRecord | None:
        """The map of the same change that made what another one read."""
        earlier = itertools.takewhile(lambda record: record is not reader, self.stage.change.maps)
        return next((record for record in [*earlier][::-1] if name in record.map.targets.values()), None)

    def _check(self, record: MapRecord) -> str:
        sources = self._sources(record)
        operation, names = record.map.operation, record.map.targets
        expected = operation.forward(sources)
        for role, name in names.items():
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
        if torch.equal(stored, rounded) or bool(((stored == rounded) | (stored.isnan() & rounded.isnan())).all()):
            return self._overflow(stored, sources)
        if not bool((stored.isfinite() | ~expected.isfinite()).all()):
            return "is not finite where its weight map gives finite values"
        if record.map.operation.structural and not any(self._earlier(n, record) for n in record.map.sources.values()):
            return f"is not what its weight map {record.map} gives"
        return self._beyond_rounding(record, role, stored, sources)

    def _overflow(self, stored: torch.Tensor, sources: Tensors) -> str:
        if all_finite(stored) or not all(map(all_finite, sources.values())):
            return ""
        return f"overflows {stored.dtype}: the folded values are too large for it"

    def _beyond_rounding(self, record: MapRecord, role: str, stored: torch.Tensor, sources: Tensors) -> str:
        """Weights that were trained since are carried back and rounded: they agree to one rounding of the sources."""
        units = [torch.finfo(t.dtype).eps / 2 for t in (*sources.values(), stored) if t.is_floating_point()]

        def run() -> list[torch.Tensor]:
            return [record.map.operation.forward(self._sources(record, wide=True))[role]]

        with Arithmetic():
            exact = run()
        allowed = SLACK * max(units) * spread(run, exact, 0)[0] + max(units) * exact[0].abs()
        distance = (widen(stored) - exact[0]).abs()
        if bool((distance <= allowed).all()):
            return ""
        return f"is not what its weight map {record.map} gives: it is off by up to {float(distance.max()):.3g}"


def _apply_again(transformation: Transformation, stage: Stage) -> dict[str, torch.Tensor] | str:
    """The tensors after applying a transformation to a float64 copy; a sentence where that does something else."""
    twin = wide_copy(stage.before)
    assert isinstance(twin, GraphModule)
    try:
        twin = transformation(twin)
    except Exception as error:  # whatever a foreign transformation raises on float64, it then cannot tell
        return f"it cannot be applied to a float64 copy: {error}"
    old, new = [record_node(n) for n in stage.after.graph.nodes], [record_node(n) for n in twin.graph.nodes]
    fields = ("name", "op", "target")
    if len(old) != len(new) or not all(_alike(a, b, fields) for a, b in zip(old, new, strict=True)):
        return "it makes another graph of a float64 copy"
    named = {**dict(twin.named_parameters(remove_duplicate=False)), **dict(twin.named_buffers(remove_duplicate=False))}
    return {name: tensor.detach() for name, tensor in named.items()}


def _alike(a: object, b: object, fields: tuple[str, ...]) -> bool:
    return all(same_value(getattr(a, f), getattr(b, f)) for f in fields)


def by_signature(transformations: Iterable[Transformation]) -> Mapping[int, Transformation]:
    """Transformations by the signature that a change notes."""
    from refold.transformation import Composition

    found: dict[int, Transformation] = {}
    for t in transformations:
        parts = by_signature(t.transformations) if isinstance(t, Composition) else {}
        found |= {**parts, t.signature: t}
    return found
