"""Arguments and outputs as flat lists of leaves. The only file of this package that touches torch's pytree module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

Structure = pytree.TreeSpec


def flatten(value: Any) -> tuple[list[Any], Structure]:
    return pytree.tree_flatten(value)


def unflatten(leaves: Iterable[Any], structure: Structure) -> Any:
    return pytree.tree_unflatten(leaves, structure)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, change, value)


@dataclass(frozen=True)
class Layout:
    """A nested value without its tensors: they are put back in order, everything else is constant."""

    structure: Structure
    leaves: tuple[Any, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, value: Any) -> tuple[Layout, list[torch.Tensor]]:
        leaves, structure = flatten(value)
        places = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        constants = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        return cls(structure, constants, places), [leaves[place] for place in places]

    def fill(self, tensors: Iterable[torch.Tensor]) -> Any:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return unflatten(leaves, self.structure)


class FlatModule(nn.Module):
    """A module that takes tensors and returns those at the places `kept`: what an engine outside Python can be fed."""

    def __init__(self, module: nn.Module, inputs: Layout, kept: tuple[int, ...]) -> None:
        super().__init__()
        self.module = module
        self.inputs = inputs
        self.kept = kept

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.inputs.fill(tensors)
        outputs = [leaf for leaf in flatten(self.module(*args, **kwargs))[0] if isinstance(leaf, torch.Tensor)]
        return tuple(outputs[index] for index in self.kept)
