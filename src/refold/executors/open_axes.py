"""Which sizes of a call are open in a captured graph, and within which bounds: what an engine is built for.

Sizes that vary together are one axis. The rules are those that capture found, lines of the model included.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold.capture.captured import RECORD, CaptureRecord
from refold.capture.proof import resize, size_groups
from refold.errors import PreparationFailed
from refold.nested import CALL, flatten

MOST = 2**16
"""No larger sizes are asked for."""

Place = tuple[int, int]
"""A tensor of a call, by its index, and a dimension of it."""


@dataclass(frozen=True)
class Axis:
    """One open size: where it stands, and between which sizes it may lie."""

    places: tuple[Place, ...]
    low: int
    high: int


@dataclass(frozen=True)
class OpenAxes:
    """All open sizes of a call."""

    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpenAxes:
        """Those of a captured graph, for calls like this one."""
        record: CaptureRecord | None = module.meta.get(RECORD) if isinstance(module, GraphModule) else None
        groups = [] if record is None else size_groups(record.sizes)
        if record is None or not groups:
            raise PreparationFailed("Capture left no size open.")
        leaves, tensors = record.leaves(args, kwargs), flatten((args, kwargs), CALL)[1]
        mine = [next((i for i, tensor in enumerate(tensors) if tensor is leaf), None) for leaf in leaves]
        found = []
        for _, dims in groups:
            places = [(mine[leaf], dim) for leaf, dim in dims]
            if any(index is None for index, _ in places):
                raise PreparationFailed("An input of open size is no tensor of the call.")
            found.append(Axis(tuple(places), *_bounds(record, leaves, dims)))  # type: ignore[arg-type]
        return cls(tuple(found))

    @property
    def least(self) -> list[int]:
        """The smallest size of each axis."""
        return [axis.low for axis in self.axes]

    @property
    def most(self) -> list[int]:
        """The largest size of each axis."""
        return [axis.high for axis in self.axes]

    def up_to(self, most: Sequence[int]) -> OpenAxes:
        """The same with these as the largest sizes."""
        return OpenAxes(tuple(replace(axis, high=high) for axis, high in zip(self.axes, most, strict=True)))

    def from_size(self, least: int) -> OpenAxes:
        """The same without smaller sizes."""
        return OpenAxes(tuple(replace(axis, low=max(least, axis.low)) for axis in self.axes))

    def hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the sizes of a call lie within the bounds, and are one size on each axis. It runs at every call."""
        for axis in self.axes:
            sizes = {tensors[index].shape[dim] for index, dim in axis.places}
            if len(sizes) > 1 or not axis.low <= sizes.pop() <= axis.high:
                return False
        return True

    def sizes_of(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """The size of each axis in a call."""
        return [tensors[axis.places[0][0]].shape[axis.places[0][1]] for axis in self.axes]

    def resized(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        """The tensors of a call with other sizes: repeated, or cut."""
        found = list(tensors)
        for axis, size in zip(self.axes, sizes, strict=True):
            found = resize(found, list(axis.places), size)
        return found

    def told_apart(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The call with another size on each axis, and nowhere one: a compiler takes equal sizes for the same, and one
        for a constant."""
        sizes: list[int] = []
        for size in self.sizes_of(tensors):
            sizes.append(next(n for n in itertools.count(max(2, size)) if n not in sizes))
        return self.resized(tensors, sizes)

    def shapes(self, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[tuple[int, ...]]:
        """The shapes of the tensors of a call with other sizes."""
        found = [list(tensor.shape) for tensor in tensors]
        for axis, size in zip(self.axes, sizes, strict=True):
            for index, dim in axis.places:
                found[index][dim] = size
        return [tuple(shape) for shape in found]

    def exported_shapes(self, count: int) -> tuple[dict[int, Any], ...]:
        """What `torch.export` is told of each of so many tensors."""
        shapes: tuple[dict[int, Any], ...] = tuple({} for _ in range(count))
        for index, dim in self.places():
            shapes[index][dim] = torch.export.Dim.AUTO
        return shapes

    def places(self) -> Iterator[Place]:
        """Where sizes are open."""
        return (place for axis in self.axes for place in axis.places)


def _bounds(record: CaptureRecord, leaves: list[Any], dims: Sequence[Place]) -> tuple[int, int]:
    """The smallest and the largest size that capture allows there, all else as in the example."""

    def is_allowed(size: int) -> bool:
        shapes = [list(leaf.shape) for leaf in leaves]
        for index, dim in dims:
            shapes[index][dim] = size
        empty = [torch.empty(s, dtype=leaf.dtype, device="meta") for s, leaf in zip(shapes, leaves, strict=True)]
        return not record.sizes.complaint(empty, any_float=not record.dtype_reason)

    size = leaves[dims[0][0]].shape[dims[0][1]]
    low = high = size
    for smaller in (size // 2, 4, 3, 2, 1, 0):
        if smaller < low and is_allowed(smaller):
            low = smaller
        elif smaller < low:
            break
    while high < MOST and is_allowed(min(2 * high, MOST)):
        high = min(2 * high, MOST)
    step = high // 2
    while step and high < MOST:
        high, step = (high + step if is_allowed(high + step) else high), step // 2
    return low, high
