"""Arguments and outputs as flat lists of leaves. The only file of this package that touches torch's pytree module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from refold.plain_objects import attributes_of, new_object

Structure = pytree.TreeSpec
CONSTANTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)


def flatten(value: Any) -> tuple[list[Any], Structure]:
    return pytree.tree_flatten(value)


def unflatten(leaves: Iterable[Any], structure: Structure) -> Any:
    return pytree.tree_unflatten(leaves, structure)


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The tensors of an output, also those inside of objects."""
    return Layout.of_output(output)[1]


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    """The same output with other tensors."""
    layout, tensors = Layout.of_output(output)
    return layout.fill(map(change, tensors))


@dataclass(frozen=True)
class Layout:
    """A nested value without its tensors: they are put back in order, everything else is constant."""

    structure: Structure
    leaves: tuple[Any, ...]
    places: tuple[int, ...]
    objects: tuple[tuple[int, type, Layout], ...] = ()
    """Where an object was taken apart: its class, and its attributes."""

    @classmethod
    def of(cls, value: Any) -> tuple[Layout, list[torch.Tensor]]:
        leaves, structure = flatten(value)
        places = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        constants = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(structure, constants, places), [leaves[place] for place in places]

    @classmethod
    def of_output(cls, value: Any) -> tuple[Layout, list[torch.Tensor]]:
        """Objects that are nothing but their attributes (a cache of keys and values) are taken apart, and made anew."""
        layout, tensors = cls.of(value)
        leaves, objects = list(layout.leaves), []
        for index, leaf in enumerate(layout.leaves):
            attributes = attributes_of(leaf)
            inner, held = cls.of_output(attributes) if attributes is not None else (None, [])
            if inner is not None and held:
                objects.append((index, type(leaf), inner))
                tensors += held
                leaves[index] = None
        return cls(layout.structure, tuple(leaves), layout.places, tuple(objects)), tensors

    @cached_property
    def size(self) -> int:
        """How many tensors it has places for."""
        return len(self.places) + sum(layout.size for *_, layout in self.objects)

    def same_constants(self, other: Layout) -> bool:
        """Whether another value has its tensors at the same places, and the same constants besides."""
        inner = zip(self.objects, other.objects, strict=False)
        return (
            self.structure == other.structure
            and self.places == other.places
            and [(i, cls) for i, cls, _ in self.objects] == [(i, cls) for i, cls, _ in other.objects]
            and all(same_constant(a, b) for a, b in zip(self.leaves, other.leaves, strict=True))
            and all(a.same_constants(b) for (*_, a), (*_, b) in inner)
        )

    def fill(self, tensors: Iterable[torch.Tensor]) -> Any:
        given = list(tensors)
        if len(given) != self.size:
            raise ValueError(f"there are {self.size} places, and {len(given)} tensors")
        return self._take(iter(given))

    def _take(self, tensors: Iterator[torch.Tensor]) -> Any:
        leaves = list(self.leaves)
        for place in self.places:
            leaves[place] = next(tensors)
        for index, cls, layout in self.objects:
            leaves[index] = new_object(cls.__module__, cls.__qualname__, layout._take(tensors))
        return unflatten(leaves, self.structure)


def same_constant(a: Any, b: Any) -> bool:
    """Whether two constants are the same. A number that a trace knows only by name is none; 0.0 == −0.0, but they are
    not the same; objects without tensors are as their attributes are."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, CONSTANTS):
        return bool(a == b) and (not isinstance(a, float | complex) or repr(a) == repr(b))
    one, other = attributes_of(a), attributes_of(b)
    return one is not None and other is not None and Layout.of(one)[0].same_constants(Layout.of(other)[0])


class FlatModule(nn.Module):
    """A module that takes tensors and returns those at the places `kept`: what an engine outside Python can be fed."""

    def __init__(self, module: nn.Module, inputs: Layout, kept: tuple[int, ...]) -> None:
        super().__init__()
        self.module = module
        self.inputs = inputs
        self.kept = kept
        self.traced = Traced()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.inputs.fill(tensors)
        self.traced.output = Layout.of_output(self.module(*args, **kwargs))
        outputs = self.traced.output[1]
        return tuple(outputs[index] for index in self.kept)


class Traced:
    """Holds all that a module gave when it was called last."""

    output: tuple[Layout, list[torch.Tensor]]
