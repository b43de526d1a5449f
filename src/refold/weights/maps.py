"""Weight maps: how the tensors of a rewritten model come from the original ones, and how the originals come back.

A map is plain data: an operation with its settings, the names of the tensors it reads (sources, by role) and of those
it makes (targets, by role). A `MapRecord` is a map that was applied: it holds what the inverse needs and nothing more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from refold.errors import WeightsChanged
from refold.fingerprint import fingerprint, is_sharded, same_bits
from refold.weights.correction import Correction, CorrectionEncoder, apply_correction, correct_in_place
from refold.weights.map_operation import NoInverse, Operation, Tensors
from refold.weights.sharded import Sharding, assembled_parts, local_parts, plan_back, plan_forward
from refold.weights.structural import Constant


@dataclass(frozen=True)
class WeightMap:
    """One operation between named tensors."""

    operation: Operation
    sources: dict[str, str]
    targets: dict[str, str]

    def __str__(self) -> str:
        def names(roles: dict[str, str]) -> str:
            return ", ".join(f"{role}={name}" for role, name in roles.items())

        return f"{names(self.targets)} = {self.operation}({names(self.sources)})"

    def successors(self) -> dict[str, frozenset[str]]:
        """For each target, the sources that it takes the place of in an optimizer."""
        sources = frozenset(self.sources)
        return self.operation.successors(sources) or dict.fromkeys(self.targets, sources)


class Handle:
    """A weak hold on a tensor or module that a copy or a pickle lets go of."""

    def __init__(self, thing: object | None = None) -> None:
        self._ref = None if thing is None else weakref.ref(thing)

    def get(self) -> Any:
        """The thing, if it is still alive."""
        return None if self._ref is None else self._ref()

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        return Handle()

    def __reduce__(self) -> tuple[type[Handle], tuple[()]]:
        return (Handle, ())


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor was, besides its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_parameter: bool
    original: Handle = field(compare=False)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The description of a tensor, with a weak hold on it."""
        is_parameter = isinstance(tensor, nn.Parameter)
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, is_parameter, Handle(tensor))

    def revive(self, values: torch.Tensor) -> torch.Tensor:
        """The original object if it lives and still has these bits, else a new one like it."""
        original = self.original.get()
        if original is not None and original.device == values.device and same_bits(original, values):
            return original
        if not self.is_parameter:
            return values.detach()
        trains = self.requires_grad and (values.is_floating_point() or values.is_complex())
        return nn.Parameter(values.detach(), requires_grad=trains)


@dataclass
class MapRecord:
    """A map that was applied, with what its inverse needs: never a second copy of large weights."""

    map: WeightMap
    specs: dict[str, TensorSpec]
    target_dtypes: dict[str, torch.dtype]
    kept: Tensors = field(default_factory=dict)
    corrections: dict[str, Correction] = field(default_factory=dict)
    originals: Tensors = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)
    source_fingerprints: dict[str, str] = field(default_factory=dict)
    casts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The fingerprints that a cast of the module gives to constants: nothing else distinguishes it from a change."""
    sharding: Sharding | None = None
    """How the map ran on shards. All that is stored here is then of what this rank computed with."""

    @property
    def nbytes(self) -> int:
        """The bytes of tensors and corrections that this record holds."""
        held = [*self.kept.values(), *self.originals.values()]
        return sum(t.numel() * t.element_size() for t in held) + sum(r.nbytes for r in self.corrections.values())

    def is_untouched(self, current: Tensors) -> bool:
        """Whether all targets have the very bits that this map gave them."""
        real = not any(tensor.is_meta for tensor in current.values())
        return real and not self._other_than_made(self._here(current))

    def _here(self, current: Tensors) -> Tensors:
        """The targets as this rank computes with them."""
        return local_parts(self.sharding.targets, current) if self.sharding is not None else current

    def _anywhere(self, roles: Iterable[str]) -> frozenset[str]:
        """Of the targets those that are among `roles`, on any rank."""
        if self.sharding is None:
            return frozenset(roles)
        names, mine = list(self.map.targets), set(roles)
        found = self.sharding.on_any_rank(name in mine for name in names)
        return frozenset(name for name, is_there in zip(names, found, strict=True) if is_there)

    def _other_than_made(self, here: Tensors) -> frozenset[str]:
        return self._anywhere(role for role, mark in self.fingerprints.items() if fingerprint(here[role]) != mark)

    @property
    def _operation(self) -> Operation:
        """What this rank computes with."""
        return self.map.operation if self.sharding is None else self.sharding.operation

    def changed(self, current: Tensors) -> frozenset[str]:
        """The targets whose numbers are no longer those that this map gave them; a cast alone does not count where the
        kept tensors or the fingerprints of casts show it."""
        return self._changed(self._here(current))

    def _changed(self, here: Tensors) -> frozenset[str]:
        differ = self._other_than_made(here)
        differ -= {role for role in differ if _is_cast(here[role].detach(), self.casts.get(role, ()))}
        if not differ or any(tensor.is_meta for tensor in self.kept.values()):
            return differ
        known = self._operation.from_kept({role: t.cpu() for role, t in self.kept.items()})
        return self._anywhere(role for role in differ if not self._was_only_cast(role, here[role], known.get(role)))

    def _was_only_cast(self, role: str, current: torch.Tensor, known: torch.Tensor | None) -> bool:
        if known is None or current.is_meta:
            return False
        return same_bits(known.to(self.target_dtypes[role]).to(current.dtype), current.detach().cpu())

    def recover(self, current: Tensors, weights: str = "carry") -> Tensors:
        """The values of the sources, by role, from the current targets."""
        if any(tensor.is_meta for tensor in current.values()):
            return self._on_meta_device(current)
        if self.sharding is not None:
            return assembled_parts(self.sharding.sources, self._recover(self._here(current), weights))
        sharding = plan_back(self.map.operation, self.specs, current)
        if sharding is None:
            return self._recover(current, weights)
        return replace(self, sharding=sharding).recover(current, weights)

    def forward(self, old: Tensors) -> Tensors:
        """The targets of other sources, such as those of a checkpoint."""
        sharding = self.sharding or plan_forward(self.map.operation, old)
        if sharding is None:
            return self.map.operation.forward(old)
        return assembled_parts(sharding.targets, sharding.operation.forward(local_parts(sharding.sources, old)))

    def gradient_forward(self, old: Tensors, values: Tensors, power: int) -> Tensors:
        """Move gradients or their squares, by role, from the sources to the targets (see `Operation`)."""
        operation, sharding = self.map.operation, self.sharding or plan_forward(self.map.operation, values)
        if sharding is None:
            return operation.gradient_forward(old, values, power)
        if not operation.structural:  # sums run over shards
            sharding = sharding.gathered(operation)
        here, known = (local_parts(sharding.sources, tensors) for tensors in (old, values))
        return assembled_parts(sharding.targets, sharding.operation.gradient_forward(here, known, power))

    def gradient_inverse(self, new: Tensors, values: Tensors, power: int) -> Tensors:
        """Move gradients or their squares, by role, from the targets to the sources (see `Operation`)."""
        operation, sharding = self.map.operation, self.sharding or plan_back(self.map.operation, self.specs, new)
        if sharding is None:
            return operation.gradient_inverse(new, values, power)
        if not operation.structural:
            sharding = sharding.gathered(operation)
        here, known = local_parts(sharding.targets, new), local_parts(sharding.sources, values)
        return assembled_parts(sharding.sources, sharding.operation.gradient_inverse(here, known, power))

    def kept_tensors(self) -> Tensors:
        """The kept sources as they lay when the map was applied."""
        return self.kept if self.sharding is None else assembled_parts(self.sharding.sources, self.kept)

    def _recover(self, here: Tensors, weights: str) -> Tensors:
        if self._operation.structural:
            return self._operation.inverse(here, {})
        narrowed = self._narrowed(here)
        if self._anywhere(self.fingerprints if narrowed is None else ()):
            narrowed = None
        if narrowed is not None:
            return self._rounded(self._exact(narrowed), here)
        if weights == "original":
            return self._stored()
        return self._carried(here)

    def _on_meta_device(self, current: Tensors) -> Tensors:
        """What a module on the meta device has: shapes without numbers."""
        if any(map(is_sharded, current.values())):
            sharding = self.sharding or plan_back(self.map.operation, self.specs, current)
            parts = sharding.sources if sharding is not None else {}
            return {role: part.without_numbers(self.dtype_now(role, current)) for role, part in parts.items()}
        if self.map.operation.structural:
            return self.map.operation.inverse(current, {})
        specs = self.specs.items()
        return {role: torch.empty(s.shape, dtype=self.dtype_now(role, current), device="meta") for role, s in specs}

    def _narrowed(self, current: Tensors) -> Tensors | None:
        """The targets as this map made them, if that is what they are: the same bits, in the same dtype or in a wider
        one that they were cast to since."""
        found: Tensors = {}
        for role, mark in self.fingerprints.items():
            tensor, dtype = current[role].detach(), self.target_dtypes[role]
            if tensor.dtype != dtype and torch.promote_types(tensor.dtype, dtype) != tensor.dtype:
                return None
            found[role] = tensor.to(dtype)
            widened_only = tensor.dtype == dtype or same_bits(found[role].to(tensor.dtype), tensor)
            if not widened_only or fingerprint(found[role]) != mark:
                return None
        return found

    def _exact(self, current: Tensors) -> Tensors:
        device = next(iter(current.values())).device
        kept = {role: value.to(device) for role, value in self.kept.items()}
        if self.originals:
            return kept | self.originals
        predicted = self._operation.inverse(current, kept)
        return kept | {
            role: correct_in_place(value.to(self.specs[role].dtype).contiguous(), self.corrections[role])
            for role, value in predicted.items()
        }

    def _stored(self) -> Tensors:
        if self.originals:
            return self.kept | self.originals
        live = {role: spec.original.get() for role, spec in self.specs.items() if role in self.source_fingerprints}
        if not self._anywhere(self.map.targets if any(tensor is None for tensor in live.values()) else ()):
            here = local_parts(self.sharding.sources, live) if self.sharding is not None else live
            differ = any(fingerprint(t) != self.source_fingerprints[role] for role, t in here.items())
            if not self._anywhere(self.map.targets if differ else ()):
                return self.kept | {role: t.detach() for role, t in here.items()}
        names = ", ".join(self.map.targets.values())
        raise WeightsChanged(
            f"the weights {names} were changed after the rewrite, and the original of "
            f"{', '.join(self.map.sources.values())} is no longer known: the stored correction is valid only for the "
            f"bits it was made from, and the original tensors are gone or were changed too. Undo without "
            f"weights='original' to carry the change back, or rewrite with keep='original'."
        )

    def _carried(self, here: Tensors) -> Tensors:
        kept, changed = self._kept_like(here), self._changed(here)
        predicted = self._rounded(self._operation.inverse(here, kept), here)
        exact = {role: self._partly_exact(role, value) for role, value in predicted.items()}
        reason: NoInverse | None = None
        carried: Tensors = {}
        try:
            carried = self._operation.carry(here, kept, exact, changed)
        except NoInverse as error:
            reason = error
        if self._anywhere(self.map.targets if reason else ()):
            raise reason or NoInverse("another rank says why its part of them cannot be carried back")
        return kept | self._rounded(carried, here)

    def _partly_exact(self, role: str, predicted: torch.Tensor) -> torch.Tensor:
        """What the stored correction, or the stored original, says about a role: right where nothing changed."""
        if role in self.originals:
            return self.originals[role].to(predicted)
        same_kind = predicted.dtype == self.specs[role].dtype
        return apply_correction(predicted, self.corrections[role]) if same_kind else predicted

    def _kept_like(self, current: Tensors) -> Tensors:
        """The kept tensors, moved and cast as the targets were since."""
        device = next(iter(current.values())).device
        return {role: value.to(device=device, dtype=self.dtype_now(role, current)) for role, value in self.kept.items()}

    def _rounded(self, values: Tensors, current: Tensors) -> Tensors:
        return {role: value.to(self.dtype_now(role, current)) for role, value in values.items()}

    def dtype_now(self, role: str, current: Mapping[str, Any]) -> torch.dtype:
        """The source's dtype, unless the targets that shared it were cast since: then what they are now."""
        own = self.specs[role].dtype
        for target, dtype in self.target_dtypes.items():
            if dtype == own:
                return current[target].dtype
        return own


_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def constant_record(name: str, value: torch.Tensor) -> MapRecord:
    """The record of a tensor that a rewrite made from numbers alone, under its full name."""
    weight_map = WeightMap(Constant(), {}, {"constant": name})
    record = MapRecord(weight_map, {}, {"constant": value.dtype}, fingerprints={"constant": fingerprint(value)})
    if value.is_floating_point():
        record.casts = {"constant": tuple(fingerprint(value.to(d)) for d in _FLOATS if d != value.dtype)}
    return record


def _is_cast(tensor: torch.Tensor, marks: tuple[str, ...]) -> bool:
    """Whether a tensor is one of these, or one of these that was cast once more to a wider dtype."""
    narrowed = (tensor.to(dtype) for dtype in _FLOATS if marks)
    return any(same_bits(n.to(tensor.dtype), tensor) and fingerprint(n) in marks for n in narrowed)


@torch.no_grad()
def apply_map(weight_map: WeightMap, old: Tensors, keep: str = "correction") -> tuple[Tensors, MapRecord]:
    """Compute a map's targets and the record of it. `keep='original'` keeps references instead of corrections."""
    operation = weight_map.operation
    specs = {role: TensorSpec.of(tensor) for role, tensor in old.items()}
    old = {role: tensor.detach() for role, tensor in old.items()}
    sharding = plan_forward(operation, old)
    if sharding is not None:
        operation, old = sharding.operation, local_parts(sharding.sources, old)
    new = {role: tensor.contiguous() for role, tensor in operation.forward(old).items()}
    record = MapRecord(weight_map, specs, {role: t.dtype for role, t in new.items()}, sharding=sharding)
    if not operation.structural:
        remember(record, old, new, keep)
    return new if sharding is None else assembled_parts(sharding.targets, new), record


@torch.no_grad()
def remember(record: MapRecord, old: Tensors, new: Tensors, keep: str = "correction") -> None:
    """Store in a record of a parametric map what brings `old` back from `new`, bit for bit; of shards, where it ran on
    these."""
    operation = record.map.operation if record.sharding is None else record.sharding.operation
    kept_roles = operation.kept_roles(frozenset(old))
    record.kept = {role: old[role].clone() for role in old if role in kept_roles}
    record.fingerprints = {role: fingerprint(tensor) for role, tensor in new.items()}
    record.source_fingerprints = {role: fingerprint(old[role]) for role in old if role not in kept_roles}
    record.corrections, record.originals = {}, {}
    if any(tensor.is_meta for tensor in new.values()):
        return
    if keep == "original":
        record.originals = {role: old[role] for role in old if role not in kept_roles}
        return
    coders = {role: CorrectionEncoder(old[role]) for role in old if role not in kept_roles}
    for role, value in operation.pieces(new, record.kept):
        coders[role].add(value.to(old[role].dtype))
    record.corrections = {role: coder.finish() for role, coder in coders.items()}
