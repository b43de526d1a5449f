"""Masks, indices and other integers to try in the place of those that a computation was given.

What is drawn follows from how a value is used and from what it was: 0 and 1 stay a mask, what was a permutation stays
one, an index keeps within the table it reads, and anything else is any integer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from refold.verification.integer_uses import Use

NAMES = (
    "masks and integers at random",
    "masks that close everything, least integers",
    "masks that close nothing, greatest integers",
    "masks with whole rows closed, large integers",
    "masks padded on the left, integers at which the graph does something",
    "masks padded on the right, integers in another order",
)
"""What each draw gives, by its number."""
RANDOM, CLOSED, OPEN, ROWS, LEFT, RIGHT = range(6)
_CLOSING = -1e4  # a float mask that closes a position holds at most this
_FEW = 20
_WIDE = 2**33


def is_discrete(value: object) -> bool:
    """Whether a value is a tensor of integers or booleans, or a mask of floating-point numbers."""
    return isinstance(value, torch.Tensor) and (_is_whole(value) or is_mask(value, Use()))


def is_mask(tensor: torch.Tensor, use: Use) -> bool:
    """Whether a tensor is a mask: booleans, 0 and 1 that are no indices, or 0 and one very low number."""
    if tensor.dtype == torch.bool:
        return True
    if tensor.numel() == 0 or tensor.is_complex() or math.isfinite(use.high):
        return False
    return _has_only(tensor, 0, 1) or (tensor.is_floating_point() and _closing_number(tensor) is not None)


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _has_only(tensor: torch.Tensor, low: float, high: float) -> bool:
    if _is_whole(tensor):
        ends = tensor.aminmax()
        return low <= int(ends.min) and int(ends.max) <= high
    return bool(tensor.reshape(-1)[0] * (tensor.reshape(-1)[0] - high) == 0) and bool(
        ((tensor == low) | (tensor == high)).all()
    )


def _closing_number(tensor: torch.Tensor) -> float | None:
    """The number by which an additive mask (0 and one very low number) closes a position; None for other tensors."""
    low = float(tensor.detach().min())
    return low if low <= _CLOSING and bool(((tensor == 0) | (tensor == low)).all()) else None


class DiscreteDraws:
    """Draws for tensors of one run. The numbers are those at which its operators compare or clamp."""

    def __init__(self, numbers: Sequence[float], seed: int) -> None:
        self.numbers = sorted({math.floor(n) for n in numbers if abs(n) < _WIDE})[:16]
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, tensor: torch.Tensor, use: Use, kind: int) -> torch.Tensor:
        """Another value like a discrete tensor; the tensor itself where nothing else can be drawn."""
        if tensor.numel() == 0:
            return tensor
        if is_mask(tensor, use):
            open_at = self.mask(tensor.shape, kind).to(tensor.device)
            closing = _closing_number(tensor) if tensor.is_floating_point() else None
            return open_at.to(tensor.dtype) if closing is None else torch.where(open_at, 0.0, closing).to(tensor.dtype)
        if not use.free and not tensor.is_cpu:
            return tensor  # out of range, a GPU would be lost
        low, high = (int(end) for end in tensor.aminmax())
        made = self._integers(tensor, use, kind, low, high)
        return made.to(tensor.device, tensor.dtype)

    def mask(self, shape: torch.Size, kind: int) -> torch.Tensor:
        """A mask of booleans, true where a position is open; the last axis is that of the positions."""
        if kind in (CLOSED, OPEN):
            return torch.full(shape, kind == OPEN)
        if not shape or shape[-1] < 2:
            return self._below(2, shape) == 1
        if kind == RANDOM:
            return self._with_both(self._below(2, shape) == 1)
        places = torch.arange(shape[-1])
        closed = self._below(shape[-1], torch.Size((*shape[:-1], 1)))
        closed.reshape(-1)[:2] = torch.tensor([shape[-1] - 1, shape[-1] // 2])[: closed.numel()]  # one place is left
        if kind == RIGHT:
            return places < shape[-1] - closed
        left = places >= closed
        return left & self._with_both(self._below(2, closed.shape) == 1) if kind == ROWS else left

    def _with_both(self, mask: torch.Tensor) -> torch.Tensor:
        """At least one place of either kind, where there are two."""
        mask.reshape(-1)[0] = ~mask.reshape(-1)[-1]
        return mask

    def _integers(self, tensor: torch.Tensor, use: Use, kind: int, low: int, high: int) -> torch.Tensor:
        shape = tensor.shape
        if _is_permutation(tensor) and (use.distinct or kind in (RANDOM, RIGHT)):
            return torch.rand(shape, generator=self.generator).argsort(-1)
        if not use.free or use.distinct or kind == RIGHT:
            order = torch.randperm(tensor.numel(), generator=self.generator)
            return tensor.detach().cpu().reshape(-1)[order].reshape(shape)
        least, most = self._ends(tensor.dtype, use, kind, low, high)
        if kind in (CLOSED, OPEN):
            return torch.full(shape, least if kind == CLOSED else most)
        if kind == LEFT:
            near = [n + d for n in (*self.numbers, 0) for d in (-1, 0, 1) if self._fits(n + d, tensor.dtype, use)]
            return torch.tensor(near or [least])[self._below(len(near or [least]), shape)]
        made = least + (torch.rand(shape, generator=self.generator, dtype=torch.float64) * (most - least + 1)).long()
        ends = made.clamp_(least, most).reshape(-1)
        ends[0], ends[-1] = least, most
        return made

    def _ends(self, dtype: torch.dtype, use: Use, kind: int, low: int, high: int) -> tuple[int, int]:
        """Between which integers to draw: those that the use allows, and where it allows all, few or very many."""
        limits, around = torch.iinfo(dtype), _WIDE if kind == ROWS else _FEW
        least = max(limits.min, min(low, 0) - around) if use.low == -math.inf else int(use.low)
        most = min(limits.max, max(high, 0) + around) if use.high == math.inf else int(use.high)
        return (least, most) if least <= most else (low, high)

    def _fits(self, number: int, dtype: torch.dtype, use: Use) -> bool:
        limits = torch.iinfo(dtype)
        return max(limits.min, use.low) <= number <= min(limits.max, use.high)

    def _below(self, end: int, shape: torch.Size) -> torch.Tensor:
        return torch.randint(0, end, shape, generator=self.generator)


def _is_permutation(tensor: torch.Tensor) -> bool:
    """Whether each row holds every place once."""
    if tensor.dim() == 0 or tensor.shape[-1] < 2:
        return False
    places = torch.arange(tensor.shape[-1], device=tensor.device)
    return bool((tensor.sort(-1).values == places).all())
