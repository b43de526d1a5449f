"""A module without its weights' memory: its structure on the meta device, to undo, replay or load on paper first."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import GraphModule

from refold import fx_private
from refold.change import Change
from refold.errors import GraphEdited
from refold.history import find_tensor, history
from refold.keeping import Husk, held_tensors
from refold.restoring import put_modules_back
from refold.weights import Handle

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
    twins, past = _Twins(_meta_twins(gm)), history(gm)
    root: nn.Module = type(type(gm).__name__, (nn.Module,), {})()
    for name in fx_private.TABLES:
        entries = fx_private.table(gm, name).items()
        fx_private.table(root, name).update({k: twins.of(v) for k, v in entries if k != fx_private.HISTORY_CHILD})
    hidden = fx_private.plain_attributes(gm).get("_non_persistent_buffers_set", set())
    fx_private.set_plain_attribute(root, "_non_persistent_buffers_set", set(hidden))
    for change in reversed(past.changes):
        assert past.birth is not None
        tables = {place: replace(t, before=twins.of(t.before)) for place, t in change.tables.items()}
        put_modules_back(root, replace(change, tables=tables), _hollow_sources(root, change), past.birth)
    return root


class _Twins:
    """Twins of modules and of what a history keeps of them, without memory; one thing has one twin."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo

    def of(self, value: Any) -> Any:
        """The twin of a module, a tensor, a husk, or a dictionary of them."""
        if isinstance(value, dict):
            return {key: self.of(entry) for key, entry in value.items()}
        if isinstance(value, Husk):
            return Husk(value.cls, value.attributes, self.of(value.tables), Handle())
        if not isinstance(value, nn.Module) or not _loads_plainly(value):
            return copy.deepcopy(value, self._memo)
        if id(value) not in self._memo:
            twin = fx_private.empty_module(type(value), fx_private.plain_attributes(value))
            self._memo[id(value)] = twin
            for name in fx_private.TABLES:
                fx_private.table(twin, name).update(self.of(fx_private.table(value, name)))
        return self._memo[id(value)]


def _loads_plainly(module: nn.Module) -> bool:
    """Whether loading a checkpoint runs no code of the module's own, which might write into what twins share."""
    if isinstance(module, torch.jit.ScriptModule) or fx_private.has_hooks(module):
        return False
    return not fx_private.loads_by_itself(module) or type(module).__module__.startswith("torch.nn.modules.")


def _hollow_sources(root: nn.Module, change: Change) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for record in reversed(change.maps):
        current = {r: found.pop(n) if n in found else _tensor(root, n) for r, n in record.map.targets.items()}
        values = record.recover(current).items()
        found |= {record.map.sources[role]: record.specs[role].revive(value) for role, value in values}
    return found | {name: _tensor(root, now) for name, now in change.passed.items()}


def _tensor(root: nn.Module, name: str) -> torch.Tensor:
    tensor = find_tensor(root, name)
    if tensor is None:
        raise GraphEdited(f"{name}, which holds weights since a rewrite, is no longer in the module.")
    return tensor


def parameter_over(values: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """A parameter of these values; those that were made in inference mode can only be wrapped there."""
    with torch.inference_mode(values.is_inference()):
        return nn.Parameter(values, requires_grad=requires_grad)
