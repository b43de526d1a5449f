"""Run code in float64, and measure how far its results move when every operand is rounded anew.

This is the one file of verification that uses an underscore name of torch: the dispatch mode, through which every
operator call can be seen.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from refold import fx_private
from refold.nested import map_leaves, map_tensors, tensors_in

UNIT = 2.0**-53
"""The largest relative error of one rounding to float64."""
PROBES = 3
_STEP = UNIT**0.5
MISS_PROBABILITY = 1e-9
"""The probability that all probes together understate the sensitivity that they measure by more than `slack` allows."""


def slack(numbers: int) -> float:
    """By how much the root mean square of so many normal numbers may understate their deviation, with that probability:
    P(χ²_n < n·t²) < (n·t²/2)^(n/2) / Γ(n/2 + 1), and the slack is 1/t."""
    return math.sqrt(numbers / 2) / math.exp((math.log(MISS_PROBABILITY) + math.lgamma(numbers / 2 + 1)) / numbers)


SLACK = slack(PROBES)

_FLOAT64 = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}
_FLOAT64 |= {torch.complex32: torch.complex128, torch.complex64: torch.complex128}
STEPS = {
    "eq", "ne", "lt", "le", "gt", "ge", "floor", "ceil", "round", "trunc", "sign", "argmax", "argmin", "sort",
    "argsort", "max", "min", "maximum", "minimum", "amax", "amin", "topk", "kthvalue", "median", "cummax", "cummin",
    "clamp", "clamp_min", "clamp_max", "searchsorted", "bucketize", "logical_not", "nonzero", "isclose", "hardtanh",
    "threshold",
}  # fmt: skip
"""Operators that compare. A relative perturbation would turn equality, and steps, over; their outcome has no rounding
error of its own."""


def to_float64(tensor: torch.Tensor) -> torch.Tensor:
    """A floating tensor in float64, a complex one in complex128, any other as it is."""
    return tensor.to(_FLOAT64[tensor.dtype]) if tensor.dtype in _FLOAT64 else tensor


def is_rounded(value: Any) -> bool:
    """Whether a value is a tensor of numbers that are rounded: floating point or complex."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


_TABLE = 2**18 + 1


@cache
def _table(device: torch.device, kind: str) -> torch.Tensor:
    """Random numbers, made once: perturbing needs millions of them, and a random start in the table will do."""
    generator = torch.Generator().manual_seed(0)
    if kind == "normal":
        return torch.randn(_TABLE, generator=generator, dtype=torch.float64).to(device)
    return (torch.rand(_TABLE, generator=generator, dtype=torch.float64) * 2 - 1).to(device)


class Perturbation:
    """Multiplies tensors by one plus a small, normally distributed random step."""

    kind = "normal"
    exact = STEPS
    """Operators whose operands stay as they are."""

    def __init__(self, step: float, seed: int) -> None:
        self.step = step
        self.random = random.Random(seed)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, every element perturbed."""
        return tensor * (1 + self.numbers(tensor) * self.step)

    def numbers(self, tensor: torch.Tensor) -> torch.Tensor:
        """One random number for each element of a tensor."""
        table, size = _table(tensor.device, self.kind), tensor.numel()
        start = self.random.randrange(_TABLE)
        rows = -(-(start + size) // _TABLE)
        return (table if rows == 1 else table.repeat(rows))[start : start + size].view(tensor.shape)


class OneRounding(Perturbation):
    """Rounds every element once more: up to one unit of its own dtype either way, then to that dtype."""

    kind = "even"

    def __init__(self, seed: int) -> None:
        super().__init__(1.0, seed)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            return tensor
        exact = tensor.to(torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else torch.float64)
        unit = torch.finfo(tensor.dtype).eps / 2
        return (exact * (1 + self.numbers(tensor).to(exact.dtype) * unit)).to(tensor.dtype)


class BetweenSteps(Perturbation):
    """Leaves what is only moved as it is, so that inputs reach steps unperturbed and what was computed does not."""

    exact = STEPS | {
        "clone", "copy", "cat", "stack", "where", "masked_fill", "index", "index_select", "gather", "embedding", "neg",
        "abs", "flip", "roll", "repeat", "constant_pad_nd", "_to_copy", "relu",
    }  # fmt: skip


def _name(func: Any) -> str:
    name: str = func._schema.name.split("::")[1]
    return name


class Arithmetic(TorchDispatchMode):
    """While it is on, every operator computes in float64 (unless not `float64`), on operands that `perturb` changed."""

    def __init__(self, *, float64: bool = True, perturb: Perturbation | None = None) -> None:
        super().__init__()
        self.float64 = float64
        self.perturb = perturb
        self.terms = 1.0
        """The largest number of terms that one operator added up for one of its results, about."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        written = {id(t) for t in tensors_in(fx_private.written_arguments(func, args, kwargs))}
        if self.float64:
            args, kwargs = _float64_arguments((args, kwargs), written)
        is_view = not written and fx_private.returns_alias(func)
        if self.perturb is not None and not is_view and _name(func) not in self.perturb.exact:
            args, kwargs = self._perturbed(args, kwargs, written)
        out = func(*args, **kwargs)
        self._count(args, out)
        return map_tensors(out, to_float64) if self.float64 and not written else out

    def _perturbed(self, args: Any, kwargs: Any, written: set[int]) -> tuple[Any, Any]:
        def perturb(t: torch.Tensor) -> torch.Tensor:
            if not is_rounded(t) or id(t) in written or t.numel() == 0:
                return t
            assert self.perturb is not None
            return self.perturb(t).to(t.dtype)

        perturbed: tuple[Any, Any] = map_tensors((tuple(args), kwargs), perturb)
        return perturbed

    def _count(self, args: Any, out: Any) -> None:
        operands = sorted(t.numel() for t in tensors_in(args) if t.is_floating_point())
        results = [t.numel() for t in tensors_in(out)]
        if not operands or not results or not min(results):
            return
        longest = max(max(t.shape, default=1) for t in tensors_in(args))
        product = math.sqrt(math.prod(operands[-2:]) / min(results)) if len(operands) > 1 else 1.0
        self.terms = max(self.terms, longest, operands[-1] / min(results), product)


def _float64_arguments(arguments: tuple[Any, Any], written: set[int]) -> tuple[Any, Any]:
    def lift(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return _FLOAT64.get(value, value)
        if isinstance(value, torch.Tensor):
            return value if id(value) in written else to_float64(value)
        return value

    lifted: tuple[Any, Any] = map_leaves(arguments, lift)
    return lifted


Run = Callable[[], Sequence[Any]]


def sensitivity(run: Run, base: Sequence[Any], seed: int) -> list[Any]:
    """Per result of `run`, how far each element moves per unit of relative rounding of every operand on the way: the
    root mean square over several runs with all operands perturbed by normally distributed steps. The step is √u, where
    the first-order effect stands furthest above both the rounding below it and the second order above it."""
    sums: list[Any] = [torch.zeros_like(b.abs()) if is_rounded(b) else None for b in base]
    for i in range(PROBES):
        with Arithmetic(perturb=Perturbation(_STEP, seed + i)):
            moved = run()
        for k, (b, m) in enumerate(zip(base, moved, strict=True)):
            if sums[k] is not None and isinstance(m, torch.Tensor) and m.shape == b.shape:
                # hypot: the square of a number below 1e-162 would be 0
                sums[k] = torch.hypot(sums[k], (m - b).abs().nan_to_num(0.0, 0.0, 0.0) / _STEP)
    return [None if s is None else s / math.sqrt(PROBES) for s in sums]
