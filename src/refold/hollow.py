"""A module without its weights' memory: its structure on the meta device, to undo, replay or load on paper first."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import GraphModule

from refold import fx_private
from refold.history import history, undo
from refold.keeping import held_tensors

_Module = TypeVar("_Module", bound=nn.Module)
_TENSOR_TABLES = ("_parameters", "_buffers")


def tensor_places(root: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(full name, table, key) of every parameter and buffer, also under a second name; not of scripted modules."""
    for path, module in fx_private.walk_modules(root):
        if isinstance(module, torch.jit.ScriptModule):
            continue
        prefix = path + "." if path else ""
        for name in _TENSOR_TABLES:
            table = fx_private.table(module, name)
            for key in [k for k, tensor in table.items() if tensor is not None]:
                yield prefix + key, table, key


def named_tensors(root: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by its full name, also under a second name."""
    return {name: table[key] for name, table, key in tensor_places(root)}


def meta_twin(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same kind without memory."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def hollow(module: _Module) -> _Module:
    """A copy of a module on the meta device; ties stay ties, no weight is copied, nothing is shared."""
    tensors = list(named_tensors(module).values())
    if isinstance(module, GraphModule):
        for change in history(module):
            tensors += [t for c in change.tables.values() for value in c.before.values() for t in held_tensors(value)]
            tensors += [t for record in change.maps for t in (*record.originals.values(), *record.kept.values())]
    memo: dict[int, Any] = {id(tensor): meta_twin(tensor) for tensor in tensors}
    return copy.deepcopy(module, memo)


def hollow_original(gm: GraphModule) -> GraphModule:
    """What a module was before all that its history holds, on the meta device."""
    empty = hollow(gm)
    if not history(empty):
        return empty
    return undo(empty, None, weights="original", lint_and_recompile=False)  # there are no values to carry back
