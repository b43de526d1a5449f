"""Multiply a weight by a vector along one axis: `W' = s·W`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from refold.operations.base import (
    NoInverse,
    Operation,
    Tensors,
    along,
    by_rows,
    divided,
    multiplied,
    prefer_exact,
    row_pieces,
)


@dataclass(frozen=True)
class Scale(Operation):
    """`W' = s·W` with s (role `scale`, kept) along `channel`, to `power` 1 or -1; back by division.

    The scale of a norm layer folded into the linear map behind it is this map.
    """

    structural = False
    channel: int
    power: int = 1

    def kept_roles(self, roles: frozenset[str]) -> frozenset[str]:
        return roles - {"weight"}

    def _vector(self, values: Tensors) -> torch.Tensor:
        factor = values["scale"].double()
        return factor if self.power == 1 else 1 / factor

    def _factor(self, values: Tensors, weight: torch.Tensor) -> torch.Tensor:
        return along(self._vector(values), self.channel, weight)

    def forward(self, old: Tensors) -> Tensors:
        factor = self._vector(old)
        return {"weight": by_rows(old["weight"], lambda part, rows: multiplied(part, factor, self.channel, rows))}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        factor = self._vector(kept)
        return {"weight": by_rows(new["weight"].detach(), lambda part, rows: divided(part, factor, self.channel, rows))}

    def pieces(self, new: Tensors, kept: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        weight, factor = new["weight"].detach(), self._vector(kept)
        for rows in row_pieces(weight):
            yield "weight", divided(weight[rows].double(), factor, self.channel, rows).to(weight.dtype)

    def carry(self, new: Tensors, kept: Tensors, exact: Tensors, changed: frozenset[str]) -> Tensors:
        weight = new["weight"].detach()
        factor = self._factor(kept, weight)
        if bool((weight[(factor == 0).expand_as(weight)] != 0).any()):
            raise NoInverse("a scale is 0 in a channel whose weights were changed")
        again = exact["weight"].double() * factor
        carried = torch.where(factor == 0, torch.zeros_like(again), weight.double() / factor)
        return {"weight": prefer_exact(carried, exact["weight"], again, weight)}

    def gradient_forward(self, old: Tensors, values: Tensors, power: int) -> Tensors:
        if "weight" not in old:
            return {}
        weight = old["weight"].double()
        return {"weight": weight / self._factor(values, weight) ** power}

    def gradient_inverse(self, new: Tensors, values: Tensors, power: int) -> Tensors:
        weight = new["weight"].double()
        factor = self._factor(values, weight)
        moved = {"weight": weight * factor**power}
        if power == 1 and self.power == 1 and "weight" in values:
            others = [axis for axis in range(weight.dim()) if axis != self.channel]
            moved["scale"] = (weight * values["weight"].double()).sum(others)
        return moved

    def heirs(self, roles: frozenset[str]) -> dict[str, frozenset[str]]:
        return {"weight": frozenset({"weight"})}
