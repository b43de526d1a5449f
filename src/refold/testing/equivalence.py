"""The float64 criterion: two graphs compute the same if they differ by no more than rounding explains.

How much rounding explains is measured, not guessed: the original is run with every tensor, inside and out, perturbed by
a relative noise far above float64's rounding (Monte-Carlo arithmetic). What comes out perturbed shows how strongly this
very computation amplifies a relative error of each of its numbers. Rounding perturbs a sum of n terms by up to n units
in the last place where the noise perturbs it by about √n: hence the factor n in the bound.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
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

    index: int
    error: float
    bound: float

    def __str__(self) -> str:
        return f"output {self.index} is off by {self.error:.3g}, and rounding explains {self.bound:.3g}"


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
def run(model: Callable[..., Any], inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors of a model's output, on copies of the inputs, always with the same random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        output = model(*as_copies(inputs))
    return [leaf.detach().clone() for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def as_copies(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same inputs in memory of their own."""
    return tuple(pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, i) for i in inputs)


class ValuesOfNodes(Interpreter):
    """Runs a graph and keeps the tensor that each node gives."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.tensors: dict[Node, torch.Tensor] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.tensors[n] = value
        return value


class _Perturbed(Interpreter):
    """Runs a graph and perturbs every floating-point value, in place so that views stay views."""

    def __init__(self, gm: GraphModule, generator: torch.Generator) -> None:
        super().__init__(gm)
        self.generator = generator
        self.longest = 1

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                self.longest = max(self.longest, *leaf.shape, 1)
                perturb(leaf, self.generator)
        return value


def perturb(tensor: torch.Tensor, generator: torch.Generator) -> None:
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
        clone = copy.deepcopy(original)
        for tensor in [*clone.parameters(), *clone.buffers()]:
            longest = max(longest, *tensor.shape, 1)
            perturb(tensor, generator)
        interpreter = _Perturbed(clone, generator)
        perturbed = run(interpreter.run, inputs)
        longest = max(longest, interpreter.longest)
        worst = [max(w, distance(a, b)) for w, a, b in zip(worst, perturbed, exact, strict=True)]
    return [w / _NOISE * longest for w in worst]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; infinite where shape, dtype kind or the places of NaN and infinity differ."""
    if a.shape != b.shape or a.is_floating_point() != b.is_floating_point():
        return float("inf")
    a, b = a.double(), b.double()
    usual = torch.isfinite(a) & torch.isfinite(b)
    if not torch.equal(torch.nan_to_num(a[~usual], nan=7.0), torch.nan_to_num(b[~usual], nan=7.0)):
        return float("inf")
    return float((a[usual] - b[usual]).abs().max()) if bool(usual.any()) else 0.0


def deviations(
    original: GraphModule, rewritten: nn.Module, inputs: tuple[Any, ...], dtype: torch.dtype = torch.float64
) -> Iterator[Deviation]:
    """Outputs of a rewritten model of a dtype that are further from the original's float64 result than the original's
    own are, by more than the dtype's rounding explains."""
    before, after = run(original, inputs), run(rewritten, inputs)
    if len(before) != len(after):
        yield Deviation(min(len(before), len(after)), float("inf"), 0.0)
        return
    precise, precise_inputs = as_float64(original), as_float64(inputs)
    reference, growths = run(precise, precise_inputs), amplification(precise, precise_inputs)
    for i, (truth, a, b, growth) in enumerate(zip(reference, before, after, growths, strict=True)):
        error, bound = distance(b, truth), distance(a, truth) + growth * torch.finfo(dtype).eps
        if a.dtype != b.dtype or not error <= bound:
            yield Deviation(i, error if a.dtype == b.dtype else float("inf"), bound)
