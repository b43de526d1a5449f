"""Values to try a site with: those that really reach it, and drawn ones of the same kinds and sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from refold.verifying.arithmetic import widen
from refold.verifying.leaves import map_tensors

Values = dict[str, Any]

SPECIAL = "NaN and infinities"
_LARGE = 2.0**20
_MANY, _ROWS, _PLACES = 2**14, 2, 9
_SPECIALS = (math.nan, math.inf, -math.inf, -0.0, 2.0**-1074)


def draws(real: Values, seed: int, *, wide: bool = True) -> Iterator[tuple[str, Values]]:
    """Sets of inputs with their names, in float64 or (not `wide`) as the model has them. Floating-point tensors are
    drawn; sizes, integers and masks stay as the model made them, so that they agree with each other."""
    yield "the real values", map_tensors(real, widen) if wide else real
    if not any(_is_float(t) for t in _tensors(real)):
        return
    source = _Source(seed)
    normal = source.normal

    def drawn(make: Any) -> Values:
        changed: Values = map_tensors(real, lambda t: _like(t, make(t), wide) if _is_float(t) else t)
        return changed

    def scale(t: torch.Tensor) -> float:
        size = float(t.detach().abs().double().nan_to_num(0.0, 0.0, 0.0).mean()) if t.numel() else 0.0
        return size if size > 0 else 1.0

    def scaled(t: torch.Tensor) -> torch.Tensor:
        return normal(t) * scale(t)

    def uneven(t: torch.Tensor) -> torch.Tensor:
        return normal(t) * 10.0 ** (source.even(t) * 6 - 3)

    yield "normal values", drawn(scaled)
    yield "values of very different size", drawn(uneven)
    yield "zeros", drawn(lambda t: torch.zeros_like(t, dtype=torch.float64))
    yield "large values", drawn(lambda t: normal(t) * (_LARGE if wide else math.sqrt(torch.finfo(t.dtype).max)))
    yield "negative values", drawn(lambda t: -normal(t).abs())
    yield SPECIAL, drawn(lambda t: _sprinkled(scaled(t)))


class _Source:
    """Random numbers like a tensor, drawn where it lies: a large batch on a GPU is not sent there."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def normal(self, like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=self._on(like.device), dtype=torch.float64, device=like.device)

    def even(self, like: torch.Tensor) -> torch.Tensor:
        return torch.rand(like.shape, generator=self._on(like.device), dtype=torch.float64, device=like.device)

    def _on(self, device: torch.device) -> torch.Generator:
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self.generators[device]


def cropped(real: Values) -> Values:
    """A corner of large values: less work, and another size. The very same object where nothing is large."""
    if all(t.numel() <= _MANY for t in _tensors(real)):
        return real
    corner: Values = map_tensors(real, _corner)
    return corner


def _corner(tensor: torch.Tensor) -> torch.Tensor:
    """The first rows, and along the axes that are places rather than features (N, L, C or N, C, H, W) the first few."""
    sizes = list(tensor.shape)
    places = range(2, len(sizes)) if len(sizes) > 3 else range(len(sizes) - 1)
    for dim in {0, *places} if len(sizes) > 1 else ():
        sizes[dim] = min(sizes[dim], _ROWS if dim == 0 and len(sizes) > 2 else _PLACES)
    return tensor[tuple(slice(size) for size in sizes)]


def _sprinkled(values: torch.Tensor) -> torch.Tensor:
    flat = values.reshape(-1)
    for i, special in enumerate(_SPECIALS[: flat.numel()]):
        flat[i * flat.numel() // len(_SPECIALS)] = special
    return values


def _is_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()


def _like(tensor: torch.Tensor, values: torch.Tensor, wide: bool) -> torch.Tensor:
    """Values with a tensor's device and memory layout, and with its dtype unless they are to be wide."""
    twin = torch.empty_like(tensor, dtype=torch.float64 if wide else tensor.dtype, requires_grad=False)
    return twin.copy_(values)


def _tensors(values: Values) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(values, lambda t: found.append(t) or t)  # type: ignore[func-returns-value]
    return found
