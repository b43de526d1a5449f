"""Maps that compute with numbers: a weight is scaled along an axis, or a low-rank product is added to it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from refold.weights.map_operation import (
    NoInverse,
    OnShards,
    RowwiseOperation,
    Tensors,
    along,
    by_rows,
    prefer_exact,
)


class ScaledWeight(RowwiseOperation):
    """A weight multiplied, element by element, by a factor that the kept sources determine: `W' = f·W`, `W = W'/f`."""

    @abstractmethod
    def factor(self, values: Tensors, weight: torch.Tensor) -> torch.Tensor:
        """f in float64, in a shape that broadcasts to the weight's."""

    def scaled(self, old: Tensors) -> torch.Tensor:
        """The new weight."""
        factor = self.factor(old, old["weight"])
        return by_rows(old["weight"], lambda part, rows: part * _rows_of(factor, rows))

    def rows_back(self, weight: torch.Tensor, kept: Tensors) -> Callable[[torch.Tensor, slice], torch.Tensor]:
        whole = self.factor(kept, weight)

        def divided(part: torch.Tensor, rows: slice) -> torch.Tensor:
            factor = _rows_of(whole, rows)
            return (part / factor).masked_fill_(factor == 0, 0)

        return divided

    def carry_weight(self, new: Tensors, kept: Tensors, exact: Tensors, lost: str) -> torch.Tensor:
        """The old weight when the new one was changed; `lost` says what is wrong where a factor of 0 was."""
        weight = new["weight"].detach()
        factor = self.factor(kept, weight)
        if bool((weight[(factor == 0).expand_as(weight)] != 0).any()):
            raise NoInverse(lost)
        again = exact["weight"].double() * factor
        carried = torch.where(factor == 0, torch.zeros_like(again), weight.double() / factor)
        return prefer_exact(carried, exact["weight"], again, weight)


def _rows_of(factor: torch.Tensor, rows: slice) -> torch.Tensor:
    return factor if factor.shape[0] == 1 else factor[rows]


@dataclass(frozen=True)
class Scale(ScaledWeight):
    """`W' = s·W` with s (role `scale`, kept) along `channel`, to `power` 1 or -1; back by division.

    The scale of a norm layer folded into the linear map behind it is this map.
    """

    channel: int
    power: int = 1

    def factor(self, values: Tensors, weight: torch.Tensor) -> torch.Tensor:
        factor = values["scale"].double()
        return along(factor if self.power == 1 else 1 / factor, self.channel, weight)

    def forward(self, old: Tensors) -> Tensors:
        return {"weight": self.scaled(old)}

    def on_shards(self, axis: int, parts: int, dims: int) -> OnShards | None:
        scale = {"scale": 0} if axis == self.channel else {}
        return OnShards(self, {"weight": axis} | scale, {"weight": axis})

    def carry(self, new: Tensors, kept: Tensors, exact: Tensors, changed: frozenset[str]) -> Tensors:
        return {"weight": self.carry_weight(new, kept, exact, "a scale is 0 in a channel whose weights were changed")}

    def gradient_forward(self, old: Tensors, values: Tensors, power: int) -> Tensors:
        if "weight" not in old:
            return {}
        weight = old["weight"].double()
        return {"weight": weight / self.factor(values, weight) ** power}

    def gradient_inverse(self, new: Tensors, values: Tensors, power: int) -> Tensors:
        weight = new["weight"].double()
        moved = {"weight": weight * self.factor(values, weight) ** power}
        if power == 1 and self.power == 1 and "weight" in values:
            others = [axis for axis in range(weight.dim()) if axis != self.channel]
            moved["scale"] = (weight * values["weight"].double()).sum(others)
        return moved


@dataclass(frozen=True)
class AddLowRank(RowwiseOperation):
    """`W' = W + c·B·A` with A (r×in) and B (out×r) kept; back: `W = W' − c·B·A`.

    The product is summed over the rank in order, element by element in float64: no matrix kernel, whose order of
    summation differs between machines, takes part, so the stored correction is valid on any of them.
    """

    scaling: float

    def product(self, values: Tensors, rows: slice = slice(None)) -> torch.Tensor:
        """`c·B·A` in float64, or some rows of it."""
        left, right = values["b"][rows].double(), values["a"].double()
        total = torch.zeros(left.shape[0], right.shape[1], dtype=torch.float64, device=left.device)
        for k in range(right.shape[0]):
            total += left[:, k, None] * right[k]
        return total.mul_(self.scaling)

    def forward(self, old: Tensors) -> Tensors:
        return {"weight": by_rows(old["weight"], lambda part, rows: part + self.product(old, rows))}

    def on_shards(self, axis: int, parts: int, dims: int) -> OnShards | None:
        return OnShards(self, {"weight": axis} | ({"b": 0} if axis == 0 else {"a": 1}), {"weight": axis})

    def rows_back(self, weight: torch.Tensor, kept: Tensors) -> Callable[[torch.Tensor, slice], torch.Tensor]:
        return lambda part, rows: part - self.product(kept, rows)

    def carry(self, new: Tensors, kept: Tensors, exact: Tensors, changed: frozenset[str]) -> Tensors:
        weight = new["weight"].detach()
        product = self.product(kept)
        again = exact["weight"].double() + product
        return {"weight": prefer_exact(weight.double() - product, exact["weight"], again, weight)}

    def gradient_forward(self, old: Tensors, values: Tensors, power: int) -> Tensors:
        return {"weight": old["weight"]} if "weight" in old else {}

    def gradient_inverse(self, new: Tensors, values: Tensors, power: int) -> Tensors:
        gradient = new["weight"]
        if power != 1:
            return {"weight": gradient}
        left, right = values["b"].double(), values["a"].double()
        return {
            "weight": gradient,
            "a": self.scaling * (left.T @ gradient.double()),
            "b": self.scaling * (gradient.double() @ right.T),
        }
