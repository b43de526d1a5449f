"""Weight maps: how the tensors of a rewritten model come from the original ones, and how the originals come back.

A map is plain data: an operation with its settings, the names of the tensors it reads (sources, by role) and of those
it makes (targets, by role). A `MapRecord` is a map that was applied: it holds what the inverse needs and nothing more.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import nn

from refold.errors import WeightsChanged
from refold.fingerprint import fingerprint, same_bits
from refold.residue import Residue, apply_residue, correct_by

Tensors = dict[str, torch.Tensor]


class NoInverse(Exception):
    """Why changed weights cannot be carried back; the caller turns it into a WeightsChanged that names the layer."""


class Operation(ABC):
    """One kind of map. Subclasses are frozen dataclasses whose fields are plain settings."""

    structural: ClassVar[bool]
    """Structural: the inverse is exact and needs no record. Otherwise parametric: computed in float64, rounded once."""
    registry: ClassVar[dict[str, type[Operation]]] = {}

    def __init_subclass__(cls) -> None:
        Operation.registry[cls.__name__] = cls

    @abstractmethod
    def forward(self, old: Tensors) -> Tensors:
        """The new tensors by role."""

    @abstractmethod
    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        """The old tensors by role, those of `kept_roles` left out. Parametric operations answer in float64."""

    def kept_roles(self, roles: frozenset[str]) -> frozenset[str]:
        """Sources that the targets do not determine; they are small and stored as they are."""
        return frozenset()

    def carry(self, new: Tensors, kept: Tensors, exact: Tensors, changed: frozenset[str]) -> Tensors:
        """The old tensors when new ones (the roles in `changed`) were changed; may also answer for kept roles.
        `exact` holds what the stored correction gives: right wherever the prediction did not change."""
        return self.inverse(new, kept)

    def gradient_forward(self, old: Tensors, kept: Tensors, power: int) -> Tensors:
        """Move what is shaped like a gradient (power 1) or its square (power 2) from the old to the new tensors."""
        return self.forward(old)

    def gradient_inverse(self, new: Tensors, kept: Tensors, power: int) -> Tensors:
        """Move what is shaped like a gradient (power 1) or its square (power 2) from the new to the old tensors."""
        return self.inverse(new, kept)

    def settings(self) -> dict[str, Any]:
        """The operation as JSON-able data; `Operation.from_settings` is its inverse."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {"operation": type(self).__name__, **values}

    @staticmethod
    def from_settings(data: Mapping[str, Any]) -> Operation:
        """Rebuild an operation from `settings`; only known operations are made."""
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k != "operation"}
        cls = Operation.registry.get(str(data.get("operation")))
        if cls is None:
            raise ValueError(f"unknown weight map operation {data.get('operation')!r}")
        return cls(**values)


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
        if original is not None and _is_again(original, values):
            return original
        if not self.is_parameter:
            return values.detach()
        trains = self.requires_grad and (values.is_floating_point() or values.is_complex())
        return nn.Parameter(values.detach(), requires_grad=trains)


def _is_again(original: torch.Tensor, values: torch.Tensor) -> bool:
    return original.device == values.device and same_bits(original, values)


@dataclass
class MapRecord:
    """A map that was applied, with what its inverse needs: never a second copy of large weights."""

    map: WeightMap
    specs: dict[str, TensorSpec]
    target_dtypes: dict[str, torch.dtype]
    kept: Tensors = field(default_factory=dict)
    residues: dict[str, Residue] = field(default_factory=dict)
    originals: Tensors = field(default_factory=dict)
    prints: dict[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of tensors and corrections that this record holds."""
        held = [*self.kept.values(), *self.originals.values()]
        return sum(t.numel() * t.element_size() for t in held) + sum(r.nbytes for r in self.residues.values())

    def changed(self, current: Tensors) -> frozenset[str]:
        """The targets that no longer have the bits that this map gave them."""
        return frozenset(role for role, mark in self.prints.items() if fingerprint(current[role]) != mark)

    def recover(self, current: Tensors, weights: str = "carry") -> Tensors:
        """The values of the sources, by role, from the current targets."""
        operation = self.map.operation
        if operation.structural:
            return operation.inverse(current, {})
        changed = self.changed(current)
        if not changed:
            return self._exact(current)
        if weights == "original":
            return self._stored(current)
        return self._carried(current, changed)

    def _exact(self, current: Tensors) -> Tensors:
        kept = self._kept_like(current)
        if self.originals:
            return kept | self.originals
        predicted = self._rounded(self.map.operation.inverse(current, kept), current)
        return kept | {role: apply_residue(value, self.residues[role]) for role, value in predicted.items()}

    def _stored(self, current: Tensors) -> Tensors:
        if self.originals:
            return self.kept | self.originals
        names = ", ".join(self.map.targets.values())
        raise WeightsChanged(
            f"the weights {names} were changed after the rewrite, so the stored correction, which is valid only for "
            f"the bits it was made from, cannot give the original of {', '.join(self.map.sources.values())} back. "
            f"Undo without weights='original' to carry the change back, or rewrite with keep='original'."
        )

    def _carried(self, current: Tensors, changed: frozenset[str]) -> Tensors:
        kept = self._kept_like(current)
        predicted = self._rounded(self.map.operation.inverse(current, kept), current)
        exact = {role: self._partly_exact(role, value) for role, value in predicted.items()}
        carried = self.map.operation.carry(current, kept, exact, changed)
        return kept | self._rounded(carried, current)

    def _partly_exact(self, role: str, predicted: torch.Tensor) -> torch.Tensor:
        """What the stored correction, or the stored original, says about a role: right where nothing changed."""
        if role in self.originals:
            return self.originals[role].to(predicted)
        same_kind = predicted.dtype == self.specs[role].dtype
        return apply_residue(predicted, self.residues[role]) if same_kind else predicted

    def _kept_like(self, current: Tensors) -> Tensors:
        """The kept tensors, moved and cast as the targets were since."""
        device = next(iter(current.values())).device
        return {role: value.to(device=device, dtype=self._dtype(role, current)) for role, value in self.kept.items()}

    def _rounded(self, values: Tensors, current: Tensors) -> Tensors:
        return {role: value.to(self._dtype(role, current)) for role, value in values.items()}

    def _dtype(self, role: str, current: Tensors) -> torch.dtype:
        """The source's dtype, unless the targets that shared it were cast since: then what they are now."""
        own = self.specs[role].dtype
        for target, dtype in self.target_dtypes.items():
            if dtype == own:
                return current[target].dtype
        return own


@torch.no_grad()
def apply_map(weight_map: WeightMap, old: Tensors, keep: str = "correction") -> tuple[Tensors, MapRecord]:
    """Compute a map's targets and the record of it. `keep='original'` keeps references instead of corrections."""
    operation = weight_map.operation
    old = {role: tensor.detach() for role, tensor in old.items()}
    new = {role: tensor.contiguous() for role, tensor in operation.forward(old).items()}
    record = MapRecord(weight_map, {}, {role: t.dtype for role, t in new.items()})
    if not operation.structural:
        remember(record, old, new, keep)
    return new, record


@torch.no_grad()
def remember(record: MapRecord, old: Tensors, new: Tensors, keep: str = "correction") -> None:
    """Store in a record of a parametric map what brings `old` back from `new`, bit for bit."""
    operation = record.map.operation
    kept_roles = operation.kept_roles(frozenset(old))
    record.kept = {role: old[role].clone() for role in old if role in kept_roles}
    record.prints = {role: fingerprint(tensor) for role, tensor in new.items()}
    record.residues, record.originals = {}, {}
    if keep == "original":
        record.originals = {role: old[role] for role in old if role not in kept_roles}
        return
    predicted = operation.inverse(new, record.kept)
    for role, value in predicted.items():
        record.residues[role] = correct_by(old[role], value.to(old[role].dtype))


# --- the operations ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Concatenate(Operation):
    """`y = cat(x₀, x₁, …)` along `dim`; back by slicing."""

    structural = True
    sizes: tuple[int, ...]
    dim: int = 0

    def forward(self, old: Tensors) -> Tensors:
        return {"whole": torch.cat([old[str(i)] for i in range(len(self.sizes))], self.dim)}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        parts = new["whole"].detach().split(list(self.sizes), self.dim)
        return {str(i): part for i, part in enumerate(parts)}


@dataclass(frozen=True)
class AppendColumn(Operation):
    """`W' = [W | b]`; back by slicing."""

    structural = True

    def forward(self, old: Tensors) -> Tensors:
        return {"weight": torch.cat([old["weight"], old["bias"][:, None]], 1)}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        whole = new["weight"].detach()
        return {"weight": whole[:, :-1].contiguous(), "bias": whole[:, -1].contiguous()}


@dataclass(frozen=True)
class FoldBatchNorm(Operation):
    """Fold `y = γ·(x − μ)/√(σ²+ε) + β` into the linear map before or after it. With `s = γ/√(σ²+ε)`, `t = β − s·μ`:

    after it (`x = W·u + b`):   `W' = s·W`, `b' = s·b + t`; back: `W = W'/s`, and a changed `b'` goes into β.
    before it (`z = W·y + b`):  `W' = W·s`, `b' = b + W·t`; back: `W = W'/s`, `b = b' − W·t`.

    `channel` is the axis of W along which s runs. With `guard`, s and t are made as well (see refold.runtime).
    """

    structural = False
    eps: float
    channel: int
    first: str = "linear"
    guard: bool = False

    def kept_roles(self, roles: frozenset[str]) -> frozenset[str]:
        return roles - {"weight"}

    def scale(self, values: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """s and t in float64."""
        variance = values["running_var"].double()
        gamma = values["gamma"].double() if "gamma" in values else torch.ones_like(variance)
        scale = gamma / torch.sqrt(variance + self.eps)
        shift = values["beta"].double() if "beta" in values else torch.zeros_like(variance)
        return scale, shift - scale * values["running_mean"].double()

    def forward(self, old: Tensors) -> Tensors:
        weight = old["weight"].double()
        scale, shift = self.scale(old)
        bias = old["bias"].double() if "bias" in old else None
        if self.first == "linear":
            new_bias = shift if bias is None else scale * bias + shift
        else:
            moved = (weight * self._along(shift, weight)).transpose(self.channel, -1).flatten(1).sum(1)
            new_bias = moved if bias is None else bias + moved
        new = {"weight": weight * self._along(scale, weight), "bias": new_bias}
        new |= {"scale": scale, "shift": shift} if self.guard else {}
        return {role: value.to(old["weight"].dtype) for role, value in new.items()}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        weight = new["weight"].detach().double()
        scale = self._along(self.scale(kept)[0], weight)
        return {"weight": torch.where(scale == 0, torch.zeros_like(weight), weight / scale)}

    def carry(self, new: Tensors, kept: Tensors, exact: Tensors, changed: frozenset[str]) -> Tensors:
        weight, bias = new["weight"].detach().double(), new["bias"].detach().double()
        scale, shift = self.scale(kept)
        dead = (self._along(scale, weight) == 0).expand_as(weight)
        if bool((weight[dead] != 0).any()):
            raise NoInverse("its batch norm has a scale of 0 in a channel whose folded weights were changed")
        old = torch.where(dead, exact["weight"].double(), self.inverse(new, kept)["weight"])
        if self.first == "linear" and "bias" not in changed:
            return {"weight": old}
        return {"weight": old} | self._carried_bias(bias, old, scale, shift, kept)

    def _carried_bias(
        self, bias: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, kept: Tensors
    ) -> Tensors:
        if self.first == "linear":
            if "beta" in kept:
                inner = kept["bias"].double() if "bias" in kept else torch.zeros_like(scale)
                return {"beta": bias - scale * (inner - kept["running_mean"].double())}
            if "bias" in kept and bool((scale != 0).all()):
                return {"bias": (bias - shift) / scale}
            raise NoInverse("neither the layer nor its batch norm has a bias that could hold the changed one")
        if "bias" not in kept:
            raise NoInverse("the layer has no bias of its own that could hold the changed one")
        moved = (weight * self._along(shift, weight)).transpose(self.channel, -1).flatten(1).sum(1)
        return {"bias": bias - moved}

    def gradient_forward(self, old: Tensors, kept: Tensors, power: int) -> Tensors:
        scale = self.scale(kept)[0]
        weight = old["weight"].double() / self._along(scale, old["weight"]) ** power
        if "beta" in old:
            bias = old["beta"].double()
        elif "bias" in old:
            bias = old["bias"].double() / (scale**power if self.first == "linear" else 1.0)
        else:
            bias = torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device)
        return {"weight": weight, "bias": bias}

    def gradient_inverse(self, new: Tensors, kept: Tensors, power: int) -> Tensors:
        scale = self.scale(kept)[0]
        moved = {"weight": new["weight"].double() * self._along(scale, new["weight"]) ** power}
        bias = new["bias"].double()
        if self.first == "linear":
            moved |= {"beta": bias} if "beta" in kept else {}
            return moved | ({"bias": bias * scale**power} if "bias" in kept else {})
        return moved | ({"bias": bias} if "bias" in kept else {})

    def _along(self, vector: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shape = [1] * weight.dim()
        shape[self.channel] = -1
        return vector.reshape(shape)
