"""Where the tensors of a module lie: they are told apart by the bytes they have, whatever their names."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.fx import GraphModule, Node

from refold import fx_private


def tensors_of_node(gm: GraphModule, node: Node) -> list[torch.Tensor]:
    """The tensors of the module that a node fetches, or that the module which it calls or fetches has."""
    owner, _, key = str(node.target).rpartition(".")
    try:
        found = getattr(gm.get_submodule(owner), key)
    except AttributeError:
        return []
    if isinstance(found, nn.Module):
        return [*found.parameters(), *found.buffers()]
    return [found] if isinstance(found, torch.Tensor) else []


def overlap(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Whether any of some tensors shares a byte with one of others."""
    left, right = ([e for e in map(fx_private.extent_of, tensors) if e is not None] for tensors in (some, others))
    return any(a[0] == b[0] and a[1] <= b[2] and b[1] <= a[2] for a in left for b in right)


def tied_by_memory(module: nn.Module) -> dict[int, str]:
    """Of each tensor, by its id, that shares bytes with another tensor of the module: the other's name."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    extents = ((fx_private.extent_of(tensor), name, id(tensor)) for name, tensor in tensors)
    found: dict[int, str] = {}
    widest, widest_name, widest_id = (0, 0, -1), "", 0
    for extent, name, key in sorted((extent, name, key) for extent, name, key in extents if extent is not None):
        if extent[0] == widest[0] and extent[1] <= widest[2]:
            found |= {key: widest_name, widest_id: name}
        if extent[0] != widest[0] or extent[2] > widest[2]:
            widest, widest_name, widest_id = extent, name, key
    return found
