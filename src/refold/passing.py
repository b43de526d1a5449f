"""Tensors that a change leaves in the model although it took out what held them.

A rewrite that replaces a layer by one with other settings gives the new layer the old one's weights. Undoing it must
put the weights there that the new layer has by then: they may have been trained, loaded, cast, or folded and carried
back, and then they may be other objects than those that were passed on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from refold.change import join_path
from refold.hollow import named_tensors


def passed_on(removed: dict[str, torch.Tensor], root: nn.Module) -> dict[str, str]:
    """By the name that a removed tensor had: the name under which the module has the very same tensor now, its own if
    that is one of them."""
    if not removed:
        return {}
    wanted = {id(tensor) for tensor in removed.values()}
    places: dict[int, dict[str, None]] = {}
    for name, tensor in named_tensors(root).items():
        if id(tensor) in wanted:
            places.setdefault(id(tensor), {})[name] = None
    found = {name: places[id(tensor)] for name, tensor in removed.items() if id(tensor) in places}
    return {name: name if name in now else next(iter(now)) for name, now in found.items()}


def tensors_in(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a table entry by their full names; none of scripted modules."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, nn.Module):
        yield from ((join_path(path, name), tensor) for name, tensor in named_tensors(value).items())
