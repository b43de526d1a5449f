"""A tensor of the rewritten model that no weight of the original determines."""

from __future__ import annotations

from dataclasses import dataclass

from refold.operations.base import NoInverse, Operation, Tensors


@dataclass(frozen=True)
class Constant(Operation):
    """A tensor computed from numbers and from what no checkpoint holds: a checkpoint leaves it as it is, and undoing
    lets go of it. One that was written into has no place in the original."""

    structural = False

    def forward(self, old: Tensors) -> Tensors:
        return {}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        return {}

    def carry(self, new: Tensors, kept: Tensors, exact: Tensors, changed: frozenset[str]) -> Tensors:
        if changed:
            raise NoInverse("it is a constant that no weight of the original determines, and it was written into")
        return {}
