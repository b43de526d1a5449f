"""A module without its weights' memory: its structure on the meta device, to undo, replay or load on paper first."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import GraphModule

from refold import fx_private
from refold.change import Change
from refold.errors import GraphEdited
from refold.history import find_tensor, history
from refold.keeping import held_tensors
from refold.restoring import put_modules_back

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
    return copy.deepcopy(module, _meta_twins(module))


def _meta_twins(module: nn.Module) -> dict[int, Any]:
    """For deepcopy: every tensor of a module and of its history, to be copied as one without memory."""
    tensors = list(named_tensors(module).values())
    for change in history(module) if isinstance(module, GraphModule) else ():
        tensors += [t for c in change.tables.values() for value in c.before.values() for t in held_tensors(value)]
        tensors += [t for record in change.maps for t in (*record.originals.values(), *record.kept.values())]
    return {id(tensor): meta_twin(tensor) for tensor in tensors}


def hollow_original(gm: GraphModule) -> nn.Module:
    """The modules that a module had before all that its history holds, on the meta device, without its graph: for
    names, shapes, ties and the order of a checkpoint. (The graph would cost most of the time.)"""
    memo, past = _meta_twins(gm), history(gm)
    root: nn.Module = type(type(gm).__name__, (nn.Module,), {})()
    for name in fx_private.TABLES:
        entries = fx_private.table(gm, name).items()
        copies = {key: copy.deepcopy(value, memo) for key, value in entries if key != fx_private.HISTORY_CHILD}
        fx_private.table(root, name).update(copies)
    hidden = fx_private.plain_attributes(gm).get("_non_persistent_buffers_set", set())
    fx_private.set_plain_attribute(root, "_non_persistent_buffers_set", set(hidden))
    for change in reversed(copy.deepcopy(past.changes, memo)):
        assert past.birth is not None
        put_modules_back(root, change, _hollow_sources(root, change), past.birth)
    return root


def _hollow_sources(root: nn.Module, change: Change) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for record in reversed(change.maps):
        current = {r: found.pop(n) if n in found else _tensor(root, n) for r, n in record.map.targets.items()}
        values = record.recover(current).items()
        found |= {record.map.sources[role]: record.specs[role].revive(value) for role, value in values}
    return found


def _tensor(root: nn.Module, name: str) -> torch.Tensor:
    tensor = find_tensor(root, name)
    if tensor is None:
        raise GraphEdited(f"{name}, which holds weights that a rewrite made, is no longer in the module.")
    return tensor
