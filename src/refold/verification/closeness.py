"""Compare the results of two computations of the same thing: shapes, kinds, special values, and rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from refold.nested import named_leaves
from refold.verification.float64 import PROBES, is_rounded, slack

_COMPARED = (int, str, bytes, tuple, slice, torch.dtype, torch.device, type(None))
"""Values besides tensors that say by `==` whether they are the same."""

Bounds = Callable[[], list[Any]]


@dataclass(frozen=True)
class Difference:
    """How two lists of results differ: a sentence where they do, and the element nearest to its bound."""

    sentence: str = ""
    deviation: float = 0.0
    bound: float = 0.0

    @property
    def ratio(self) -> float:
        """The deviation in units of its bound."""
        return math.inf if self.sentence else self.deviation / self.bound if self.bound else 0.0


def flat(results: Sequence[Any]) -> list[Any]:
    """The leaves of some results; Python numbers become float64 tensors, so that they are evaluated like them."""
    found = [leaf for _, leaf in named_leaves(tuple(results))]
    return [torch.tensor(x, dtype=torch.float64) if type(x) is float else x for x in found]


def both_finite(old: list[Any], new: list[Any]) -> tuple[list[Any], list[Any]]:
    """The same results with zeros wherever one of both is not finite. What an operator makes of NaN and infinities in
    its inputs is not part of what it computes: a masked attention may read the values it masks, or not."""
    pairs = [_both_finite(a, b) for a, b in zip(old, new, strict=True)] if len(old) == len(new) else []
    return ([a for a, _ in pairs], [b for _, b in pairs]) if pairs else (old, new)


def _both_finite(a: Any, b: Any) -> tuple[Any, Any]:
    if not is_rounded(a) or not is_rounded(b) or a.shape != b.shape or (all_finite(a) and all_finite(b)):
        return a, b
    finite = a.isfinite() & b.isfinite()
    return torch.where(finite, a, torch.zeros_like(a)), torch.where(finite, b, torch.zeros_like(b))


def discrete_differ(old: list[Any], new: list[Any]) -> bool:
    """Whether two lists of as many results differ in integers or booleans."""
    return len(old) == len(new) and any(map(differ_in_integers, old, new))


def differ_in_integers(a: Any, b: Any) -> bool:
    """Whether both are tensors of one shape and dtype that hold other integers or booleans."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or is_rounded(a):
        return False
    return a.shape == b.shape and a.dtype == b.dtype and not torch.equal(a, b)


def compare(old: list[Any], new: list[Any], bounds: Bounds) -> Difference:
    """Compare flat results. `bounds` gives the allowed difference of each element; it is called where they differ."""
    if len(old) != len(new):
        return Difference(f"it gives {len(new)} values instead of {len(old)}")
    for a, b in zip(old, new, strict=True):
        sentence = differ_in_kind(a, b)
        if sentence:
            return Difference(sentence)
    places = [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if is_rounded(a) and not equal(a, b)]
    if not places:
        return Difference()
    allowed = bounds()
    return max((_distance(old[i], new[i], allowed[i]) for i in places), key=lambda d: d.ratio)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all elements are equal; a NaN is equal to a NaN."""
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def differ_in_kind(a: Any, b: Any) -> str:
    """A sentence if two results differ in anything but rounding."""
    if _type(a) is not _type(b):
        return f"it gives a {type(b).__name__} instead of a {type(a).__name__}"
    if not isinstance(a, torch.Tensor):
        return f"it gives {b!r} instead of {a!r}" if isinstance(a, _COMPARED) and a != b else ""
    if a.shape != b.shape:
        return f"it gives shape {tuple(b.shape)} instead of {tuple(a.shape)}"
    if a.dtype != b.dtype:
        return f"it gives {b.dtype} instead of {a.dtype}"
    if torch.equal(a, b):
        return ""
    if not is_rounded(a):
        return f"{int((a != b).sum())} of {a.numel()} integers or booleans differ"
    if all_finite(a) and all_finite(b):
        return ""
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.isinf(), b.isinf()):
        return "NaN or infinities stand in other places"
    infinite = a.isinf()
    return "" if torch.equal(a[infinite], b[infinite]) else "infinities have the other sign"


def _type(value: Any) -> type:
    """A parameter is a tensor: which of both a value is says nothing about what it is worth."""
    return torch.Tensor if type(value) is torch.nn.Parameter else type(value)


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite; a finite sum settles it in one pass."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def pooled(old: list[Any], new: list[Any], moved: list[Any], unit: float) -> Difference:
    """Compare along every axis: the root mean square of the difference in each slice, and that of how far one rounding
    moves it. Many numbers together need less slack than each alone, so this sees what the single elements cannot."""
    found = [Difference()]
    for a, b, m in zip(old, new, moved, strict=True):
        if m is None or not is_rounded(a) or a.numel() == 0:
            continue
        distance = (a - b).abs().nan_to_num(0.0, 0.0, 0.0)
        for dim in range(a.dim()):
            others = [d for d in range(a.dim()) if d != dim]
            size = a.numel() // a.shape[dim]
            allowed = _mean(m, others) * (slack(PROBES * size) * unit)
            found.append(_distance(_mean(distance, others), torch.zeros_like(allowed), allowed))
    return max(found, key=lambda d: d.ratio)


def _mean(values: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return values.square().mean(dims).sqrt() if dims else values


def _distance(a: torch.Tensor, b: torch.Tensor, allowed: torch.Tensor) -> Difference:
    distance = (a - b).abs().nan_to_num(0.0, 0.0, 0.0)
    ratio = torch.where(distance > 0, distance / allowed, 0.0)
    worst = int(ratio.reshape(-1).argmax())
    deviation, bound = float(distance.reshape(-1)[worst]), float(allowed.reshape(-1)[worst])
    if not float(ratio.reshape(-1)[worst]) <= 1:
        return Difference(f"it is off by {deviation:.3g} where rounding allows {bound:.3g}", deviation, bound)
    return Difference("", deviation, bound)
