"""Copies of a module by one function, which says what becomes of its tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import GraphModule

from refold.fx_private import named_tensors, parameter_over
from refold.record.stack import history

_Module = TypeVar("_Module", bound=nn.Module)
Converter = Callable[[torch.Tensor], torch.Tensor]


def copy_with(module: _Module, convert: Converter) -> _Module:
    """A deep copy of a module and its history whose tensors are made by `convert`; ties stay ties."""
    return copy.deepcopy(module, converted_tensors(module, convert))


def converted_tensors(module: nn.Module, convert: Converter) -> dict[int, Any]:
    """For deepcopy: by the id of every tensor of a module and of its history, what it becomes."""
    return {id(tensor): _converted(tensor, convert) for tensor in _tensors_of(module)}


def _converted(tensor: torch.Tensor, convert: Converter) -> torch.Tensor:
    values = convert(tensor)
    return parameter_over(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def _tensors_of(module: nn.Module) -> Iterable[torch.Tensor]:
    found = {id(tensor): tensor for tensor in named_tensors(module).values()}
    for change in history(module) if isinstance(module, GraphModule) else ():
        found |= {id(tensor): tensor for _name, tensor in change.held_tensors()}
        kept = [tensor for record in change.maps for tensor in (*record.originals.values(), *record.kept.values())]
        found |= {id(tensor): tensor for tensor in kept}
    return found.values()


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same kind without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def meta_copy(module: _Module) -> _Module:
    """A copy on the meta device: its structure, to undo, replay or load into, without a weight."""
    return copy_with(module, on_meta)


def working_copy(module: GraphModule) -> GraphModule:
    """A copy to undo and to run: tensor objects and records of its own, over the same memory."""
    return copy_with(module, torch.Tensor.detach)


def shared_copy(gm: GraphModule) -> GraphModule:
    """A copy to rewrite: a graph and tensor objects of its own, over the same memory. It is cheap, because the history,
    which is never changed, is shared."""
    past = history(gm)
    return copy.deepcopy(gm, {**converted_tensors(gm, torch.Tensor.detach), id(past): past})
