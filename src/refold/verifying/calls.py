"""Inputs of a model as calls, and calls like them: another batch size, another length, other integers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold.capturing.module import RECORD
from refold.errors import RefoldError
from refold.verifying.leaves import map_tensors, tensors_in

_ROWS = 2


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    name: str = "the given inputs"

    def map(self, change: Callable[[torch.Tensor], torch.Tensor], name: str | None = None) -> Call:
        """The same call with other tensors."""
        args, kwargs = map_tensors((self.args, self.kwargs), change)
        return Call(args, kwargs, self.name if name is None else name)

    def on(self, model: nn.Module) -> Any:
        """Call a model; it gets tensors of its own, since it may write into them."""
        own = self.map(torch.Tensor.clone)
        if isinstance(model, GraphModule) and RECORD in model.meta:
            model.meta[RECORD].check(own.args, own.kwargs)
        return quietly(model, *own.args, **own.kwargs)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors in the arguments."""
        return [t for _, t in tensors_in((self.args, self.kwargs))]


def quietly(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a model; a GraphModule's own call would write every failure to stderr, and trying means failing."""
    return nn.Module.__call__(model, *args, **kwargs)


def as_calls(inputs: Any) -> list[Call]:
    """A dict of keyword arguments, a tuple of positional ones, a tensor, or a list of several such."""
    if isinstance(inputs, list):
        if not inputs:
            raise RefoldError("there are no inputs to verify with; give at least one dict, tuple or tensor.")
        return [call for each in inputs for call in as_calls(each)]
    if isinstance(inputs, Mapping):
        return [Call((), dict(inputs))]
    if isinstance(inputs, tuple):
        return [Call(inputs, {})]
    return [Call((inputs,), {})]


def fewer_rows(call: Call) -> Call:
    """The first rows of a large batch: they take the same way through a model, in less time."""
    size = _common_size(call, 0)
    return call if size is None or size <= _ROWS else _sliced(call, 0, size, _ROWS)


def variants(call: Call, seed: int) -> Iterator[tuple[Call, ...]]:
    """Calls like this one that the model may or may not accept: of each tuple, the first that it takes is enough."""
    rows = _common_size(call, 0)
    if rows is not None:
        yield (_sliced(call, 0, rows, 1, "one row") if rows > 1 else _repeated(call, rows, 2),)
    generator = torch.Generator().manual_seed(seed)
    mixed = call.map(lambda t: _other_integers(t, generator), "other integers")
    length = _common_size(call, 1)
    if length is not None and length > 1:
        yield _sliced(mixed, 1, length, length // 2, "half the length, other integers"), mixed
    elif any(_is_integer(t) for t in call.tensors):
        yield (mixed,)


def _common_size(call: Call, dim: int) -> int | None:
    """The size along an axis that most tensors agree on."""
    sizes = Counter(t.shape[dim] for t in call.tensors if t.dim() > dim)
    return sizes.most_common(1)[0][0] if sizes else None


def _sliced(call: Call, dim: int, size: int, wanted: int, name: str | None = None) -> Call:
    def cut(t: torch.Tensor) -> torch.Tensor:
        return t.narrow(dim, 0, wanted) if t.dim() > dim and t.shape[dim] == size else t

    return call.map(cut, name)


def _repeated(call: Call, size: int, times: int) -> Call:
    def repeat(t: torch.Tensor) -> torch.Tensor:
        return t.repeat(times, *[1] * (t.dim() - 1)) if t.dim() > 0 and t.shape[0] == size else t

    return call.map(repeat, "twice the rows")


def _is_integer(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _other_integers(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Integers from the same set; of what looks like a mask some are switched off, never a row's first."""
    if not _is_integer(tensor) or tensor.numel() < 2:
        return tensor
    values = tensor.unique()
    if values.numel() == 1 and int(values[0]) == 1:
        flips = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
        flips.narrow(-1, 0, 1).fill_(1)
        return flips
    order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
    return tensor.reshape(-1)[order].reshape(tensor.shape)
