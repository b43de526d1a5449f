"""Values to try: those that really reach a site, and sampled ones of the same kinds and sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold.call_arguments import CallArguments
from refold.capture.captured import RECORD
from refold.errors import RefoldError
from refold.nested import map_tensors, tensors_in
from refold.verification.discrete_draws import NAMES, RANDOM, DiscreteDraws, is_discrete
from refold.verification.float64 import to_float64
from refold.verification.integer_uses import Use

Values = dict[str, Any]

REAL = "the real values"
SPECIAL = "NaN and infinities"
_LARGE = 2.0**20
ROWS = 2
_MANY, _PLACES = 2**14, 9
_SPECIALS = (math.nan, math.inf, -math.inf, -0.0, 2.0**-1074)


def samples_of(
    real: Values, seed: int, watched: Watched | None = None, *, float64: bool = True, few: bool = False
) -> Iterator[tuple[str, Values]]:
    """Sets of inputs with their names, in float64 or, without `float64`, as the model has them: the real ones, then
    others for every tensor among them, floating-point or not (`watched` saw how they are used). Sizes stay. With `few`
    there are only some."""
    yield REAL, map_tensors(real, to_float64) if float64 else real
    source, watched = _Source(seed), watched or Watched({}, ())
    discrete = {id(t) for t in tensors_in(real) if is_discrete(t)}
    has_floats = any(t.is_floating_point() for t in tensors_in(real))

    def sampled(make: Any, change: Any = None) -> Values:
        """Floating-point tensors by one function; masks and integers by another one."""

        def one(t: torch.Tensor) -> torch.Tensor:
            if change is not None and id(t) in discrete:
                t = change(t)
                return to_float64(t) if float64 else t
            return _like(t, make(t), float64) if t.is_floating_point() else t

        changed: Values = map_tensors(real, one)
        return changed

    def scaled(t: torch.Tensor) -> torch.Tensor:
        return source.normal(t) * _scale(t)

    if has_floats:
        yield "normal values", sampled(scaled)
    draws = DiscreteDraws(watched.numbers, seed)
    for kind in (range(len(NAMES)) if not few else (RANDOM,)) if discrete else ():
        yield NAMES[kind], sampled(scaled, partial(_drawn, draws, watched.uses, kind))
    if has_floats and watched.numbers:
        yield "values at which the graph does something", sampled(lambda t: _at(source, t, watched.numbers))
    if not has_floats or few:
        return
    yield "values of very different size", sampled(lambda t: source.normal(t) * 10.0 ** (source.even(t) * 6 - 3))
    yield "zeros", sampled(lambda t: torch.zeros_like(t, dtype=torch.float64))
    largest = _LARGE if float64 else None
    yield "large values", sampled(lambda t: source.normal(t) * (largest or math.sqrt(torch.finfo(t.dtype).max)))
    yield "negative values", sampled(lambda t: -source.normal(t).abs())
    yield SPECIAL, sampled(lambda t: _sprinkled(scaled(t)))


@dataclass(frozen=True)
class Watched:
    """What a run of a site told: how its integer inputs are used, and at which numbers its operators compare or clamp
    (none where they do not)."""

    uses: dict[int, Use]
    numbers: tuple[float, ...]


def _drawn(draws: DiscreteDraws, uses: dict[int, Use], kind: int, t: torch.Tensor) -> torch.Tensor:
    return draws.draw(t, uses.get(id(t), Use(free=False)), kind)


def _scale(t: torch.Tensor) -> float:
    size = float(t.detach().abs().double().nan_to_num(0.0, 0.0, 0.0).mean()) if t.numel() else 0.0
    return size if size > 0 else 1.0


def _at(source: _Source, t: torch.Tensor, numbers: tuple[float, ...]) -> torch.Tensor:
    """These numbers, what lies around them, and equal numbers."""
    found = [*numbers, *(n + d for n in numbers for d in (-0.5, 0.5))]
    choice = (source.even(t) * len(found)).long().clamp_(max=len(found) - 1)
    return torch.tensor(found, dtype=torch.float64, device=t.device)[choice]


class _Source:
    """Random numbers like a tensor, made where it lies: a large batch on a GPU is not sent there."""

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
    if all(t.numel() <= _MANY for t in tensors_in(real)):
        return real
    corner: Values = map_tensors(real, _corner)
    return corner


def _corner(tensor: torch.Tensor) -> torch.Tensor:
    """The first rows, and along the axes that are places rather than features (N, L, C or N, C, H, W) the first few."""
    sizes = list(tensor.shape)
    places = range(2, len(sizes)) if len(sizes) > 3 else range(len(sizes) - 1)
    for dim in {0, *places} if len(sizes) > 1 else ():
        sizes[dim] = min(sizes[dim], ROWS if dim == 0 and len(sizes) > 2 else _PLACES)
    return tensor[tuple(slice(size) for size in sizes)]


def _sprinkled(values: torch.Tensor) -> torch.Tensor:
    flat = values.reshape(-1)
    for i, special in enumerate(_SPECIALS[: flat.numel()]):
        flat[i * flat.numel() // len(_SPECIALS)] = special
    return values


def _like(tensor: torch.Tensor, values: torch.Tensor, float64: bool) -> torch.Tensor:
    """Values with a tensor's device and memory layout, and with its dtype unless float64 is asked for."""
    made = torch.empty_like(tensor, dtype=torch.float64 if float64 else tensor.dtype, requires_grad=False)
    return made.copy_(values)


@dataclass(frozen=True)
class NamedCall(CallArguments):
    """The arguments of one call of a model, with a name for sentences."""

    name: str = "the given inputs"

    def on(self, model: nn.Module) -> Any:
        """Call a model; it gets tensors of its own, since it may write into them."""
        own = self.map(torch.Tensor.clone)
        if isinstance(model, GraphModule) and RECORD in model.meta:
            model.meta[RECORD].check(own.args, own.kwargs)
        return own.given_to(partial(quietly, model))


def quietly(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a model; a GraphModule's own call would write every failure to stderr, and trying means failing."""
    return nn.Module.__call__(model, *args, **kwargs)


def as_calls(inputs: Any) -> list[NamedCall]:
    """A dict of keyword arguments, a tuple of positional ones, a tensor, or a list of several such."""
    if isinstance(inputs, list):
        if not inputs:
            raise RefoldError("there are no inputs to verify with; give at least one dict, tuple or tensor.")
        return [call for each in inputs for call in as_calls(each)]
    is_call = isinstance(inputs, CallArguments | Mapping | tuple)
    return [NamedCall.of(inputs if is_call else (inputs,))]
