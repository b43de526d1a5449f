"""Maps that only move numbers: their inverse is exact, always from the current weights, and needs no record."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from refold.operations.base import Operation, Tensors


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
        return {"weight": whole[:, :-1], "bias": whole[:, -1]}


@dataclass(frozen=True)
class Slice(Operation):
    """`x₀, x₁, … = split(y)` along `dim`; back by concatenation. The reverse of Concatenate."""

    structural = True
    sizes: tuple[int, ...]
    dim: int = 0

    def forward(self, old: Tensors) -> Tensors:
        parts = old["whole"].split(list(self.sizes), self.dim)
        return {str(i): part.contiguous() for i, part in enumerate(parts)}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        return {"whole": torch.cat([new[str(i)].detach() for i in range(len(self.sizes))], self.dim)}

    def heirs(self, roles: frozenset[str]) -> dict[str, frozenset[str]]:
        return {str(i): roles for i in range(len(self.sizes))}


@dataclass(frozen=True)
class Transpose(Operation):
    """`y = xᵀ` (the last two axes); back by transposing."""

    structural = True

    def forward(self, old: Tensors) -> Tensors:
        return {"weight": old["weight"].mT.contiguous()}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        return {"weight": new["weight"].detach().mT}


@dataclass(frozen=True)
class Reshape(Operation):
    """The same numbers in another shape; back to `before`."""

    structural = True
    before: tuple[int, ...]
    after: tuple[int, ...]

    def forward(self, old: Tensors) -> Tensors:
        return {"weight": old["weight"].reshape(self.after)}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        return {"weight": new["weight"].detach().reshape(self.before)}


@dataclass(frozen=True)
class Pad(Operation):
    """Append `count` zeros along `dim`; back by slicing. Numbers trained into the padding cannot come back."""

    structural = True
    count: int
    dim: int = 0

    def forward(self, old: Tensors) -> Tensors:
        shape = list(old["weight"].shape)
        shape[self.dim] = self.count
        return {"weight": torch.cat([old["weight"], old["weight"].new_zeros(shape)], self.dim)}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        whole = new["weight"].detach()
        return {"weight": whole.narrow(self.dim, 0, whole.shape[self.dim] - self.count)}


@dataclass(frozen=True)
class Fill(Operation):
    """A constant that no weight of the original determines: stated so that checkpoints know where it comes from."""

    structural = True
    shape: tuple[int, ...]
    value: float
    dtype: str = "float32"

    def forward(self, old: Tensors) -> Tensors:
        return {"constant": torch.full(self.shape, self.value, dtype=getattr(torch, self.dtype))}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        return {}
