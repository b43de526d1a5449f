"""A whole model in an executor and in torch, on drawn inputs: padded masks, ends of ranges, special numbers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from refold.executors.exported_engine import EnginePlan, disagreement
from refold.executors.guards import Bounds, Guard, allows
from refold.executors.semantics import same_specials
from refold.nested import OUTPUT, flatten, rebuild

_SECONDS = 1.5
_SEED = 30
_DRAWS = ("masks", "ends", "special", "zeros", "others")


def why_other_meaning(plan: EnginePlan, guard: Guard, run: Callable[..., Any], plain: Callable[..., Any]) -> str | None:
    """How an executor differs from torch on drawn inputs that the guard lets through; None if nowhere.

    After a second and a half no more are tried: of the long calls, only the first draws."""
    start = time.monotonic()
    for name in _DRAWS:
        tensors = list(drawn_inputs(plan.tensors, guard, name))
        changed = any(not _same(a, b) for a, b in zip(tensors, plan.tensors, strict=True))
        if not changed or not allows(guard, tensors):
            continue
        reason = _difference(plan, tensors, run, plain)
        if reason is not None:
            return f"On drawn inputs ({name}), {reason}"
        if time.monotonic() - start > _SECONDS:
            return None
    return None


def drawn_inputs(example: list[torch.Tensor], guard: Guard, name: str) -> Iterator[torch.Tensor]:
    """Inputs like those of the example, of another kind."""
    generator = torch.Generator().manual_seed(_SEED + _DRAWS.index(name))
    bounds = {condition.place: condition for condition in guard if isinstance(condition, Bounds)}
    for place, tensor in enumerate(example):
        yield _drawn(tensor, bounds.get(place), name, generator).to(tensor.dtype)


def _drawn(tensor: torch.Tensor, bounds: Bounds | None, name: str, generator: torch.Generator) -> torch.Tensor:
    if tensor.is_complex() or tensor.numel() == 0:
        return tensor
    if tensor.is_floating_point():
        return _floats(tensor, bounds, name, generator)
    if bool(((tensor == 0) | (tensor == 1)).all()):
        return _mask(tensor, name)
    low, high = (int(end) for end in (tensor.aminmax() if bounds is None else (bounds.low, bounds.high)))
    if name == "ends":
        ends = torch.randint(0, 2, tensor.shape, generator=generator)
        return torch.where(ends == 0, torch.tensor(low), torch.tensor(high))
    return torch.randint(low, max(low + 1, min(high, low + 2**16) + 1), tensor.shape, generator=generator)


def _floats(tensor: torch.Tensor, bounds: Bounds | None, name: str, generator: torch.Generator) -> torch.Tensor:
    scale = tensor.double().nan_to_num(0, 0, 0).square().mean().sqrt().item() or 1.0
    values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * scale
    if name == "zeros":
        return torch.zeros_like(tensor)
    if name == "special" and bounds is None:
        flat = values.view(-1)
        for i, special in enumerate((math.nan, math.inf, -math.inf, -0.0)[: flat.numel()]):
            flat[i * flat.numel() // 4] = special
    return values if bounds is None else values.clamp(bounds.low, bounds.high)


def _mask(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Padding at the right of the last row and at the left of the first; rows of zeros; all closed."""
    mask = torch.ones_like(tensor)
    if name == "zeros":
        return torch.zeros_like(tensor)
    if tensor.dim() == 0 or name == "ends":
        return mask
    if tensor.dim() == 1:
        mask[:: 2 if name == "masks" else 3] = 0
        return mask
    width = max(1, mask.shape[-1] // 3)
    mask[-1:, ..., -width:] = 0
    if name in ("masks", "others"):
        if mask.shape[0] > 1 or name == "masks":
            mask[:1] = 1
            mask[:1, ..., :width] = 0
    elif name == "special":
        mask[0] = 0
    return mask


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or torch.equal(one, other)


def _difference(
    plan: EnginePlan, tensors: list[torch.Tensor], run: Callable[..., Any], plain: Callable[..., Any]
) -> str | None:
    mine, its = _outputs(plan, tensors, plain), _outputs(plan, tensors, run)
    if mine is None or its is None:
        return None if mine is its else "it raises." if its is None else "torch raises, and it does not."
    return disagreement(mine, its) or _other_specials(mine, its)


def _other_specials(mine: list[torch.Tensor], its: list[torch.Tensor]) -> str | None:
    real = [(a, b) for a, b in zip(mine, its, strict=True) if a.is_floating_point()]
    return None if all(same_specials(a, b) for a, b in real) else "it has NaN or infinity elsewhere."


def _outputs(plan: EnginePlan, tensors: list[torch.Tensor], run: Callable[..., Any]) -> list[torch.Tensor] | None:
    args, kwargs = rebuild(plan.inputs, [tensor.clone() for tensor in tensors])
    try:
        with torch.no_grad():
            return flatten(run(*args, **kwargs), OUTPUT)[1]
    except Exception:  # torch and engines raise whatever they like
        return None
