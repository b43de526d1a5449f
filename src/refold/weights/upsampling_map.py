"""The map of a convolution behind nearest upsampling: its taps are summed to those of a transposed convolution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from refold.weights.map_operation import NoInverse, Operation, Tensors, row_pieces


@dataclass(frozen=True)
class SumTaps(Operation):
    """`V[i, o, u] = Σₑ W[o, i, k−1−u+e]` with 0 ≤ e < s along each axis of space, where W has no tap: 0.

    Back from the ends, where sums have few taps, by differences: `w[k−1] = v[0]`, `w[k−2] = v[1] − v[0]`, … Not every V
    is such sums: (k+s−1) numbers come from k along each axis.
    """

    structural = False
    scales: tuple[int, ...]

    def forward(self, old: Tensors) -> Tensors:
        weight = old["weight"]
        sizes = [size + scale - 1 for size, scale in zip(weight.shape[2:], self.scales, strict=True)]
        new = weight.new_empty(weight.shape[1], weight.shape[0], *sizes)
        for rows in row_pieces(weight):
            new[:, rows] = self._sums(weight[rows].double()).transpose(0, 1).to(weight.dtype)
        return {"weight": new}

    def inverse(self, new: Tensors, kept: Tensors) -> Tensors:
        return {"weight": torch.cat([piece for _, piece in self.pieces(new, kept)])}

    def pieces(self, new: Tensors, kept: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        weight = new["weight"].detach().transpose(0, 1)
        for rows in row_pieces(weight):
            yield "weight", self._taps(weight[rows].double()).to(weight.dtype)

    def carry(self, new: Tensors, kept: Tensors, exact: Tensors, changed: frozenset[str]) -> Tensors:
        weight = new["weight"].detach().transpose(0, 1)
        space = list(range(2, weight.dim()))
        taps = self._taps(weight.double())
        # each sum was rounded once, and a tap is a sum of them with factors of at most 1, up to 2 along each axis
        rounding = torch.finfo(weight.dtype).eps * 2 ** len(space) * weight.double().abs().sum(space, keepdim=True)
        if not bool(((self._sums(taps) - weight.double()).abs() <= rounding).all()):
            raise NoInverse(
                "it was changed so that it is no longer made of sums of the taps of a smaller kernel, and only such "
                "kernels are a convolution behind an upsampling; train before it is split, or keep it split"
            )
        again = self.forward(exact)["weight"].transpose(0, 1)
        unchanged = (again == weight).all(-1).flatten(2).all(-1).reshape(*weight.shape[:2], *[1] * len(space))
        return {"weight": torch.where(unchanged, exact["weight"].double(), taps)}

    def gradient_forward(self, old: Tensors, values: Tensors, power: int) -> Tensors:
        return {}  # one gradient of a sum cannot be told from those of its terms

    def gradient_inverse(self, new: Tensors, values: Tensors, power: int) -> Tensors:
        if power != 1:
            return {}  # squares of sums need cross terms
        gradient = new["weight"].transpose(0, 1).double()
        for axis, scale in enumerate(self.scales, 2):
            gradient = gradient.unfold(axis, scale, 1).sum(-1)
        return {"weight": gradient.flip(list(range(2, gradient.dim())))}

    def _sums(self, taps: torch.Tensor) -> torch.Tensor:
        for axis, scale in enumerate(self.scales, 2):
            mirrored = taps.flip(axis)
            size = taps.shape[axis]
            taps = taps.new_zeros(*taps.shape[:axis], size + scale - 1, *taps.shape[axis + 1 :])
            for start in range(scale):
                taps.narrow(axis, start, size).add_(mirrored)
        return taps

    def _taps(self, sums: torch.Tensor) -> torch.Tensor:
        for axis, scale in enumerate(self.scales, 2):
            sums = torch.stack(_differences(list(sums.unbind(axis)), scale), axis)
        return sums


def _differences(sums: list[torch.Tensor], scale: int) -> list[torch.Tensor]:
    """The terms, the last one first, of sums of `scale` neighbours: each from the end that is nearer, since roundings
    add up; the middle one from the smaller sum, which was rounded less."""
    count = len(sums) - scale + 1
    first, last = _from_one_end(sums, scale, count), _from_one_end(sums[::-1], scale, count)[::-1]
    found = [first[i] if 2 * i < count - 1 else last[i] for i in range(count)]
    if count % 2:
        i = count // 2
        found[i] = torch.where(sums[i].abs() < sums[i + scale - 1].abs(), first[i], last[i])
    return found[::-1]


def _from_one_end(sums: list[torch.Tensor], scale: int, count: int) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for i in range(count):
        term = sums[i] - sums[i - 1] if i else sums[i]
        found.append(term + found[i - scale] if i >= scale else term)
    return found
