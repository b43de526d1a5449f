"""Weight maps of batch norms beside convolutions whose weights are laid out unlike those of a linear layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from refold.operations.base import Operation, Tensors
from refold.operations.batch_norm import FoldBatchNorm


@dataclass(frozen=True)
class FoldBatchNormInTransposed(FoldBatchNorm):
    """A batch norm behind a transposed convolution, whose weight is (in, out/groups, …).

    The weight is turned into one row for each output channel, folded as that of a linear layer, and turned back.
    """

    groups: int = 1

    def forward(self, old: Tensors) -> Tensors:
        return self._back(self._plain.forward(self._rows(old)), old)

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        return self._back(self._plain.inverse(self._rows(new), kept), new)

    def carry(self, new: Tensors, kept: Tensors, exact: Tensors, changed: frozenset[str]) -> Tensors:
        return self._back(self._plain.carry(self._rows(new), kept, self._rows(exact), changed), new)

    def gradient_forward(self, old: Tensors, values: Tensors, power: int) -> Tensors:
        return self._back(self._plain.gradient_forward(self._rows(old), self._rows(values), power), old)

    def gradient_inverse(self, new: Tensors, values: Tensors, power: int) -> Tensors:
        return self._back(self._plain.gradient_inverse(self._rows(new), self._rows(values), power), new)

    @property
    def _plain(self) -> FoldBatchNorm:
        return FoldBatchNorm(self.eps, 0, self.first, self.guard)

    def _rows(self, tensors: Tensors) -> Tensors:
        """The weight as (out, in/groups · kernel)."""
        weight = tensors.get("weight")
        if weight is None:
            return tensors
        inputs, outputs = weight.shape[:2]
        split = weight.reshape(self.groups, inputs // self.groups, outputs, -1)
        return tensors | {"weight": split.transpose(1, 2).reshape(self.groups * outputs, -1)}

    def _back(self, tensors: Tensors, like: Tensors) -> Tensors:
        """The weight as (in, out/groups, …) again."""
        if "weight" not in tensors:
            return tensors
        inputs, outputs, *kernel = like["weight"].shape
        split = tensors["weight"].reshape(self.groups, outputs, inputs // self.groups, -1)
        return tensors | {"weight": split.transpose(1, 2).reshape(inputs, outputs, *kernel)}


@dataclass(frozen=True)
class FoldBatchNormBeforeConvolution(FoldBatchNorm):
    """A batch norm before a convolution over `dims` dimensions that pads nothing: `W'[o,i] = W[o,i]·sᵢ`, and
    `b'[o] = b[o] + Σ W[o,i,…]·tᵢ`."""

    dims: int = 2

    def _outer(self, bias: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return (bias[:, None] * shift).reshape(len(bias), len(shift), *[1] * self.dims)

    def _norm_gradients(self, weight: torch.Tensor, bias: torch.Tensor, values: Tensors) -> Tensors:
        old, mean = values["weight"].double(), values["running_mean"].double()
        spread = torch.sqrt(values["running_var"].double() + self.eps)
        back = old.flatten(2).sum(2).T @ bias
        through = (weight * old).flatten(2).sum((0, 2))
        return {"gamma": (through - mean * back) / spread, "beta": back}


@dataclass(frozen=True)
class Relayout(Operation):
    """The same numbers in another order in memory; `strides` are those to come back to."""

    structural = True
    strides: tuple[int, ...]

    def forward(self, old: Tensors) -> Tensors:
        return {"weight": old["weight"]}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        weight = new["weight"].detach()
        back = torch.empty_strided(weight.shape, self.strides, dtype=weight.dtype, device=weight.device)
        return {"weight": back.copy_(weight)}
