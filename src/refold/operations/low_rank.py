"""Add the product of two thin matrices to a weight: a LoRA that is merged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from refold.operations.base import Operation, Tensors, by_rows, prefer_exact, row_pieces


@dataclass(frozen=True)
class AddLowRank(Operation):
    """`W' = W + c·B·A` with A (r×in) and B (out×r) kept; back: `W = W' − c·B·A`.

    The product is summed over the rank in order, element by element in float64: no matrix kernel, whose order of
    summation differs between machines, takes part, so the stored correction is valid on any of them.
    """

    structural = False
    scaling: float

    def kept_roles(self, roles: frozenset[str]) -> frozenset[str]:
        return roles - {"weight"}

    def product(self, values: Tensors, rows: slice = slice(None)) -> torch.Tensor:
        """`c·B·A` in float64, or some rows of it."""
        left, right = values["b"][rows].double(), values["a"].double()
        total = torch.zeros(left.shape[0], right.shape[1], dtype=torch.float64, device=left.device)
        for k in range(right.shape[0]):
            total += left[:, k, None] * right[k]
        return total.mul_(self.scaling)

    def forward(self, old: Tensors) -> Tensors:
        return {"weight": by_rows(old["weight"], lambda part, rows: part + self.product(old, rows))}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        return {"weight": by_rows(new["weight"].detach(), lambda part, rows: part - self.product(kept, rows))}

    def pieces(self, new: Tensors, kept: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        weight = new["weight"].detach()
        for rows in row_pieces(weight):
            yield "weight", (weight[rows].double() - self.product(kept, rows)).to(weight.dtype)

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

    def heirs(self, roles: frozenset[str]) -> dict[str, frozenset[str]]:
        return {"weight": frozenset({"weight"})}
