"""The float64 criterion: two graphs compute the same if they differ by no more than rounding explains.

How much rounding explains is measured, not guessed: the original is run with every tensor, inside and out, disturbed by
a relative noise far above float64's rounding (Monte-Carlo arithmetic). What comes out disturbed tells how strongly this
very computation amplifies a relative error of each of its numbers. Rounding disturbs a sum of n terms by up to n units
in the last place where the noise disturbs it by about √n: hence the factor n in the bound.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

_NOISE = 2.0**-36
_DRAWS = 4


@dataclass(frozen=True)
class Deviation:
    """How far an output is from the reference, and how far rounding may carry it."""

    place: int
    error: float
    bound: float

    def __str__(self) -> str:
        return f"output {self.place} is off by {self.error:.3g}, and rounding explains {self.bound:.3g}"


def as_float64(thing: Any) -> Any:
    """A copy of a model or of inputs in which every floating-point tensor is float64."""
    return as_dtype(thing, torch.float64)


def as_dtype(thing: Any, dtype: torch.dtype) -> Any:
    """A copy of a model or of inputs in which every floating-point tensor has a dtype."""
    if isinstance(thing, nn.Module):
        return copy.deepcopy(thing).to(dtype)
    return pytree.tree_map(lambda v: _cast(v, dtype), thing)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    return value.detach().clone().to(dtype if value.is_floating_point() else value.dtype)


@torch.no_grad()
def run(model: nn.Module, inputs: tuple[Any, ...], seed: int = 0) -> list[torch.Tensor]:
    """The tensors of a model's output, on copies of the inputs, with the random numbers of a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        output = model(*as_copies(inputs))
    return [leaf.detach().clone() for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def as_copies(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same inputs in memory of their own."""
    return tuple(pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, i) for i in inputs)


class _Disturbed(Interpreter):
    """Runs a graph and disturbs every floating-point value, in place so that views stay views."""

    def __init__(self, gm: GraphModule, generator: torch.Generator) -> None:
        super().__init__(gm)
        self.generator = generator
        self.longest = 1

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                self.longest = max(self.longest, *leaf.shape, 1)
                disturb(leaf, self.generator)
        return value


def disturb(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Multiply every number by 1 ± noise, where the tensor can be written to."""
    if not tensor.is_floating_point() or tensor.numel() == 0 or (0 in tensor.stride() and tensor.numel() > 1):
        return
    noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
    tensor.mul_(1 + _NOISE * noise.to(tensor.dtype))


@torch.no_grad()
def amplification(original: GraphModule, inputs: tuple[Any, ...]) -> list[float]:
    """For each output, the error that a relative error of 1 in every number would grow to (first order), times n."""
    exact = run(copy.deepcopy(original), inputs)
    worst = [0.0] * len(exact)
    longest = 1
    for draw in range(_DRAWS):
        generator = torch.Generator().manual_seed(draw)
        twin = copy.deepcopy(original)
        for tensor in [*twin.parameters(), *twin.buffers()]:
            longest = max(longest, *tensor.shape, 1)
            disturb(tensor, generator)
        interpreter = _Disturbed(twin, generator)
        disturbed = _interpret(interpreter, inputs)
        longest = max(longest, interpreter.longest)
        worst = [max(w, distance(a, b)) for w, a, b in zip(worst, disturbed, exact, strict=True)]
    return [w / _NOISE * longest for w in worst]


def _interpret(interpreter: Interpreter, inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = interpreter.run(*as_copies(inputs))
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; infinite where shape, dtype kind or the places of NaN and infinity differ."""
    if a.shape != b.shape or a.is_floating_point() != b.is_floating_point():
        return float("inf")
    a, b = a.double(), b.double()
    usual = torch.isfinite(a) & torch.isfinite(b)
    if not torch.equal(torch.nan_to_num(a[~usual], nan=7.0), torch.nan_to_num(b[~usual], nan=7.0)):
        return float("inf")
    return float((a[usual] - b[usual]).abs().max()) if bool(usual.any()) else 0.0


def deviations(original: GraphModule, rewritten: nn.Module, inputs: tuple[Any, ...]) -> Iterator[Deviation]:
    """Outputs of a rewritten float64 model that are further from the original's than rounding explains."""
    expected, found = run(original, inputs), run(rewritten, inputs)
    if len(expected) != len(found):
        yield Deviation(min(len(expected), len(found)), float("inf"), 0.0)
        return
    unit = torch.finfo(torch.float64).eps
    for i, (a, b, growth) in enumerate(zip(expected, found, amplification(original, inputs), strict=True)):
        error, bound = distance(a, b), growth * unit
        if not error <= bound:
            yield Deviation(i, error, bound)


def deviations_in(
    dtype: torch.dtype, original: GraphModule, rewritten: nn.Module, inputs: tuple[Any, ...]
) -> Iterator[Deviation]:
    """The same for models in a narrower dtype: the rewritten one may be off the float64 result by what the original is
    off, and by what the dtype's own rounding explains."""
    precise, precise_inputs = as_float64(original), as_float64(inputs)
    reference, growths = run(precise, precise_inputs), amplification(precise, precise_inputs)
    before, after = run(original, inputs), run(rewritten, inputs)
    for i, (truth, a, b, growth) in enumerate(zip(reference, before, after, growths, strict=True)):
        if a.dtype != b.dtype:
            yield Deviation(i, float("inf"), 0.0)
        error, bound = distance(b, truth), distance(a, truth) + growth * torch.finfo(dtype).eps
        if not error <= bound:
            yield Deviation(i, error, bound)
