"""What every kind of weight map can do: forward, back, and carry gradients and moments along."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

Tensors = dict[str, torch.Tensor]


class NoInverse(Exception):
    """Why changed weights cannot be carried back; the caller turns it into a WeightsChanged that names the layer."""


@dataclass(frozen=True)
class OnShards:
    """How each rank runs a map on its own shards: by which operation, and along which axis each tensor is cut; roles
    that are not named are whole on every rank."""

    operation: Operation
    sources: dict[str, int]
    targets: dict[str, int]


class Operation(ABC):
    """One kind of map. Subclasses are frozen dataclasses whose fields are plain settings."""

    structural: ClassVar[bool] = True
    """Structural: the inverse is exact and needs no record. Otherwise parametric: computed in float64, rounded once."""
    stored_name: ClassVar[str]
    """The name in saved folders."""
    registry: ClassVar[dict[str, type[Operation]]] = {}

    def __init_subclass__(cls, stored_as: str = "") -> None:
        cls.stored_name = stored_as or cls.__name__
        Operation.registry[cls.stored_name] = cls

    @abstractmethod
    def forward(self, old: Tensors) -> Tensors:
        """The new tensors by role."""

    @abstractmethod
    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        """The old tensors by role, those of `kept_roles` left out. Structural operations answer with views of the new
        tensors; parametric ones compute in float64 and round once, element by element, so that the bits are the same
        anywhere."""

    def pieces(self, new: Tensors, kept: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        """The inverse, rounded, piece by piece in the order of elements: so that no second whole layer is in memory."""
        yield from self.inverse(new, kept).items()

    def kept_roles(self, roles: frozenset[str]) -> frozenset[str]:
        """Sources that the targets do not determine; they are small and stored as they are."""
        return frozenset()

    def from_kept(self, kept: Tensors) -> Tensors:
        """Targets that the kept sources alone determine, in float64: they distinguish a cast from a change."""
        return {}

    def carry(self, new: Tensors, kept: Tensors, exact: Tensors, changed: frozenset[str]) -> Tensors:
        """The old tensors when new ones (the roles in `changed`) were changed; may also answer for kept roles.
        `exact` holds what the stored correction gives: right wherever the new tensors did not change."""
        return self.inverse(new, kept)

    def gradient_forward(self, old: Tensors, values: Tensors, power: int) -> Tensors:
        """Move gradients (power 1) or their squares (power 2) from the old to the new tensors; `values` are the old
        tensors themselves. Roles that the given ones do not determine are left out."""
        return self.forward(old)

    def gradient_inverse(self, new: Tensors, values: Tensors, power: int) -> Tensors:
        """Move gradients (power 1) or their squares (power 2) from the new to the old tensors; `values` are the old
        tensors themselves. Roles that the given ones do not determine are left out."""
        return self.inverse(new, values)

    def successors(self, roles: frozenset[str]) -> dict[str, frozenset[str]]:
        """For each target, the sources that it takes the place of in an optimizer (default: all of the one target)."""
        return {}

    def on_shards(self, axis: int, parts: int, dims: int) -> OnShards | None:
        """How ranks run this map where its weight (the first source), which has so many dims, is cut along an axis into
        so many parts. None: they cannot without what others hold, and the tensors are gathered."""
        return None

    def settings(self) -> dict[str, Any]:
        """The operation as JSON-able data; `Operation.from_settings` is its inverse."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {"operation": self.stored_name, **values}

    @staticmethod
    def from_settings(data: Mapping[str, Any]) -> Operation:
        """Rebuild an operation from `settings`; only known operations are made."""
        cls = Operation.registry.get(str(data.get("operation")))
        if cls is None:
            raise ValueError(f"unknown weight map operation {data.get('operation')!r}")
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k != "operation"}
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"{cls.__name__} does not have these settings: {error}") from None


class RowwiseOperation(Operation):
    """A parametric map of one weight that is computed some rows at a time; its other sources are small and kept."""

    structural = False

    @abstractmethod
    def rows_back(self, weight: torch.Tensor, kept: Tensors) -> Callable[[torch.Tensor, slice], torch.Tensor]:
        """What makes rows of the old weight from those rows of the new one, both in float64."""

    def kept_roles(self, roles: frozenset[str]) -> frozenset[str]:
        return roles - {"weight"}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        weight = new["weight"].detach()
        return {"weight": by_rows(weight, self.rows_back(weight, kept))}

    def pieces(self, new: Tensors, kept: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        weight = new["weight"].detach()
        compute = self.rows_back(weight, kept)
        for rows in row_pieces(weight):
            yield "weight", compute(weight[rows].double(), rows).to(weight.dtype)

    def successors(self, roles: frozenset[str]) -> dict[str, frozenset[str]]:
        return {"weight": frozenset({"weight"})}


_PIECE = 1 << 14
"""The numbers of a weight that are computed with at a time: float64 needs twice the memory of the weight itself."""


def row_pieces(weight: torch.Tensor) -> Iterator[slice]:
    """Some rows of a weight after the other: few enough that float64 never needs another whole weight."""
    rows = max(1, _PIECE // max(1, weight[0].numel())) if weight.shape[0] else 1
    for start in range(0, weight.shape[0], rows):
        yield slice(start, min(start + rows, weight.shape[0]))


def by_rows(weight: torch.Tensor, compute: Callable[[torch.Tensor, slice], torch.Tensor]) -> torch.Tensor:
    """A tensor like the weight, computed some rows at a time (from float64 rows) and rounded once."""
    found = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for rows in row_pieces(weight):
        found[rows] = compute(weight[rows].double(), rows).to(weight.dtype)
    return found


def along(vector: torch.Tensor, axis: int, like: torch.Tensor) -> torch.Tensor:
    """A vector in a shape that broadcasts along one axis of a tensor."""
    shape = [1] * like.dim()
    shape[axis] = -1
    return vector.reshape(shape)


def prefer_exact(carried: torch.Tensor, exact: torch.Tensor, again: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Element by element: what the correction says, where mapping that forward (`again`) gives the very number that is
    there now (so every number that was not changed comes back bit for bit), and the computed inverse elsewhere."""
    return torch.where(again.to(new.dtype) == new, exact.to(carried.dtype), carried)
