"""How the integers that enter a computation are used there: as indices below a bound, as numbers, or in unknown ways.

One run is watched, operator by operator. A value is followed through whatever keeps it, shifts it or scales it, so that
an index into a table bounds the input it was made from. Indices out of range must never be drawn: on a GPU they would
end the process's use of it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from refold import fx_private
from refold.nested import tensors_in
from refold.verification.float64 import STEPS, TorchDispatchMode


@dataclass
class Use:
    """What an integer input may be: anything between two ends, or only what it was (if not `free`)."""

    low: float = -math.inf
    high: float = math.inf
    free: bool = True
    distinct: bool = False
    """Whether it says where something is written: two equal places would make the result depend on the order."""

    def narrow(self, low: float, high: float) -> None:
        """Keep it between two ends as well."""
        self.low, self.high = max(self.low, low), min(self.high, high)


@dataclass(frozen=True)
class Shifted:
    """`scale·x + b` for an input x, with b between two ends."""

    scale: float = 1.0
    low: float = 0.0
    high: float = 0.0

    def plus(self, low: float, high: float) -> Shifted:
        return Shifted(self.scale, self.low + low, self.high + high)

    def times(self, factor: float) -> Shifted:
        low, high = sorted((self.low * factor, self.high * factor))
        return Shifted(self.scale * factor, low, high)

    def limit(self, use: Use, low: float, high: float) -> None:
        """Narrow x so that the shifted value lies between two ends."""
        if self.scale == 0:
            return
        ends = sorted(((low - self.low) / self.scale, (high - self.high) / self.scale))
        use.narrow(math.ceil(ends[0]), math.floor(ends[1]))


Origin = dict[int, Shifted | None]
"""The inputs that a value was made from, by number, each with how; None where it is no shift."""

_KEEPING = {
    "clone", "_to_copy", "cat", "stack", "where", "masked_fill", "repeat", "flip", "roll", "constant_pad_nd", "tril",
    "triu", "contiguous", "copy", "lift_fresh", "lift_fresh_copy", "maximum", "minimum", "amax", "amin", "_unsafe_view",
}  # fmt: skip
_ALONG = {
    "index_select", "gather", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill",
}  # fmt: skip
_WRITING = {"scatter", "index_copy", "index_put", "_index_put_impl", "_unsafe_index_put"}
_LISTED = {"index", "_unsafe_index", "index_put", "_index_put_impl", "_unsafe_index_put"}
_TABLES = {"embedding", "_embedding_bag", "_embedding_bag_forward_only"}
_SORTED = {"sort", "topk", "max", "min", "cummax", "cummin", "median", "kthvalue", "mode"}
_PLACES = {"argmax", "argmin", "argsort", "nonzero", "searchsorted", "bucketize", "count_nonzero"}
_ADDED = {"sum", "mean", "prod", "cumsum", "cumprod", "any", "all", "mm", "bmm", "addmm", "baddbmm", "dot", "mv"}
_NUMBERS = {
    "floor_divide", "remainder", "fmod", "div", "__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "pow",
}  # fmt: skip
_HARMLESS = _NUMBERS | _KEEPING | _ALONG | _LISTED | _SORTED | _PLACES | _ADDED | {"embedding", "aminmax"}


class IntegerUses(TorchDispatchMode):
    """While it is on, what becomes of some tensors is noted, and which numbers and steps the operators have."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.uses = [Use() for _ in tensors]
        self.numbers: set[float] = set()
        self.has_steps = False
        self._origins: dict[int, tuple[weakref.ref[torch.Tensor], Origin]] = {}
        for number, tensor in enumerate(tensors):
            self._set(tensor, {number: Shifted()})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        name = name if name.endswith("__") else name.removesuffix("_")
        self.has_steps |= name in STEPS
        if torch.Tag.pointwise in func.tags or name in STEPS or name in _NUMBERS:
            self.numbers |= {float(x) for x in args if type(x) in (int, float) and math.isfinite(x)}
        if self._origins:
            try:
                self._follow(name, func, args, kwargs, out)
            except (LookupError, TypeError, AttributeError):  # a call in a form that is not known here
                self._narrow(self._read_by(args, kwargs))
        return out

    def close(self) -> None:
        """Draw nothing new: not all of the uses were seen."""
        for use in self.uses:
            use.free = False

    # --- following a value -------------------------------------------------------------------------------------------

    def _follow(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        read = [(t, origin) for t in tensors_in((args, kwargs)) if (origin := self._of(t))]
        if not read:
            return
        for indices, low, high in _indexed(name, args):
            self._limit(indices, low, high, name)
        is_known = name in _HARMLESS or torch.Tag.pointwise in func.tags or fx_private.returns_alias(func)
        written = {id(t) for t in tensors_in(fx_private.written_arguments(func, args, kwargs))}
        for tensor, origin in read:
            if (not is_known and not tensor.is_floating_point()) or (written and id(tensor) not in written):
                self._narrow(origin)
        results = list(tensors_in(out))
        for result in results[:1] if name in _SORTED else () if name in _PLACES else results:
            if result.dtype != torch.bool:
                self._set(result, self._made(name, func, args, kwargs))

    def _read_by(self, args: Any, kwargs: Any) -> Origin:
        return {n: None for t in tensors_in((args, kwargs)) for n in self._of(t)}

    def _made(self, name: str, func: Any, args: Any, kwargs: Any) -> Origin:
        """What the result of an operator was made from, and how."""
        if name in _ALONG | _LISTED | _TABLES:
            return dict(self._of(args[0]))
        if name in ("remainder", "fmod") and type(args[1]) in (int, float):
            return {}
        if name == "clamp" and len(args) > 2 and None not in args[:3]:
            return {}
        origins = [o for t in tensors_in(args) if t.dtype != torch.bool and (o := self._of(t))]
        keeps = name in _KEEPING | _SORTED or fx_private.returns_alias(func)
        if not keeps and len(origins) == 1 and len(args) == 2 and not kwargs:
            return self._shifted(name, args, origins[0])
        found: Origin = {}
        for origin in origins:
            for number, how in origin.items():
                found[number] = how if keeps and found.get(number, how) == how else None
        return found

    def _shifted(self, name: str, args: Any, origin: Origin) -> Origin:
        """The result of arithmetic with one operand that was made from inputs."""
        is_first = isinstance(args[0], torch.Tensor) and bool(self._of(args[0]))
        other = _ends(args[1] if is_first else args[0])
        step = _ARITHMETIC.get(name)
        if other is None or step is None:
            return dict.fromkeys(origin)
        return {n: None if how is None else step(how, *other, is_first) for n, how in origin.items()}

    def _limit(self, indices: Any, low: float, high: float, name: str) -> None:
        for number, how in self._of(indices).items():
            if how is None:
                self.uses[number].free = False
            else:
                how.limit(self.uses[number], low, high)
            self.uses[number].distinct |= name in _WRITING

    def _narrow(self, origin: Origin) -> None:
        for number in origin:
            self.uses[number].free = False

    def _of(self, tensor: Any) -> Origin:
        ref, origin = self._origins.get(id(tensor), (None, {}))
        return origin if ref is not None and ref() is tensor else {}

    def _set(self, tensor: torch.Tensor, origin: Origin) -> None:
        if origin:
            self._origins[id(tensor)] = weakref.ref(tensor), origin
        else:
            self._origins.pop(id(tensor), None)


def _ends(value: Any) -> tuple[float, float] | None:
    """The least and the greatest element of an operand of integers."""
    if type(value) in (int, float):
        return value, value
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex() or not value.numel():
        return None
    return float(value.min()), float(value.max())


_Step = Callable[[Shifted, float, float, bool], Shifted | None]
_ARITHMETIC: dict[str, _Step] = {
    "add": lambda how, low, high, first: how.plus(low, high),
    "sub": lambda how, low, high, first: how.plus(-high, -low) if first else how.times(-1).plus(low, high),
    "rsub": lambda how, low, high, first: how.times(-1).plus(low, high),
    "mul": lambda how, low, high, first: how.times(low) if low == high and how.scale.is_integer() else None,
    # a whole number is at most floor(y) if and only if it is at most y
    "floor_divide": lambda how, low, high, first: how.times(1 / low) if first and low == high and low > 0 else None,
}


def _indexed(name: str, args: Any) -> Iterator[tuple[torch.Tensor, float, float]]:
    """The operands of an operator that are indices, each with its first and last valid index."""
    if name in _TABLES:
        yield args[1], 0, args[0].shape[0] - 1
    elif name in _ALONG:
        size = args[0].shape[args[1]] if args[0].dim() else 1
        yield args[2], 0, size - 1
    elif name in _LISTED:
        dim = 0
        for indices in args[1]:
            if indices is not None and indices.dtype not in (torch.bool, torch.uint8):
                is_negative = bool(indices.numel()) and int(indices.min()) < 0
                yield indices, -args[0].shape[dim] if is_negative else 0, args[0].shape[dim] - 1
            dim += indices.dim() if indices is not None and indices.dtype in (torch.bool, torch.uint8) else 1
