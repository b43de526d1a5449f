"""The original as a checkpoint sees it: its tensors through the weight maps, both ways, and its modules.

Tensors move through the weight maps of a history like a database through its migrations: forward in order, back in
reverse order. Names that no map mentions stay as they are.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold import fx_private
from refold.capture.captured import RECORD
from refold.errors import CheckpointMismatch, WeightsChanged
from refold.fingerprint import fingerprint
from refold.fx_private import named_tensors, tensor_places
from refold.record.change import Change
from refold.record.copies import converted_tensors, on_meta
from refold.record.reversal import put_modules_back, recover_tensors
from refold.record.sharded_modules import is_fully_sharded, show_shards
from refold.record.stack import check_graph_module, history
from refold.record.stored_modules import StoredModule
from refold.weights import NoInverse, Tensors
from refold.weights.maps import Handle, MapRecord


def original_state_dict(gm: GraphModule) -> dict[str, Any]:
    """The state dict of the original, from the folded module: its names, order and values. Weights that were changed
    while folded are carried back as `undo` does; what no rewrite touched is shared with the module, as in torch.
    Parameters that a captured graph never reads (`refold.unread_parameters`) come last. Of sharded weights (DTensors)
    it holds DTensors, and all ranks call it."""
    show_shards(check_graph_module(gm))
    found = _own_state_dict(gm)
    for name, tensor in unread_tensors(gm).items():
        found.setdefault(name, tensor.detach())
    return found


def _own_state_dict(gm: GraphModule) -> dict[str, Any]:
    if not history(check_graph_module(gm)):
        return gm.state_dict()
    values = to_original(gm, named_tensors(gm))
    original = OriginalModules(gm)
    found: OrderedDict[str, Any] = OrderedDict()
    for key in original.keys:
        is_tensor = key in original.tensors
        found[key] = values[key].detach() if is_tensor else original.holder(gm, key).get_extra_state()
    found._metadata = original.metadata  # type: ignore[attr-defined]
    return found


@torch.no_grad()
def to_original(gm: GraphModule, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Tensors with the names and shapes of the folded module's (its own, or an average of them), as the original's."""
    state = dict(tensors)
    for change in reversed(history(gm).changes):
        _check_unmapped(change, state)
        for record in reversed(change.maps):
            if not record.map.sources and not state.keys() & set(record.map.targets.values()):
                continue  # a constant, which a checkpoint of the folded module does not hold either
            current = {role: take(state, name) for role, name in record.map.targets.items()}
            state |= {record.map.sources[role]: value for role, value in _recover(record, current, change).items()}
        for name in change.fingerprints:
            state.pop(name, None)
        state = (
            dict(change.held_tensors()) | {n: state[now] for n, now in change.renamed.items() if now in state} | state
        )
    return state


@torch.no_grad()
def to_folded(gm: GraphModule, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Tensors with the names and shapes of the original's, as the folded module's."""
    state = dict(tensors)
    for change in history(gm).changes:
        for record in change.maps:
            old = {role: take(state, name) for role, name in record.map.sources.items()}
            new = record.forward(old)
            state |= {record.map.targets[role]: value for role, value in new.items()}
        rename_retained(state, change)
    return state


def unread_tensors(gm: GraphModule) -> Tensors:
    """Parameters of the captured model that its graph never reads: checkpoints of the model hold them."""
    record = gm.meta.get(RECORD)
    own = named_tensors(gm) if record is not None and record.unread else {}
    return {name: t for name, t in record.unread.items() if name not in own} if record is not None else {}


def take(state: Tensors, name: str) -> torch.Tensor:
    if name not in state:
        raise CheckpointMismatch(f"{name} is missing, and a rewrite needs it. Give a tensor for every weight.")
    return state.pop(name)


def rename_retained(state: Tensors, change: Change) -> None:
    """Give tensors that a change retained the names they have after it; tied ones are one then."""
    for before, after in change.renamed.items():
        if before in state:
            value = state.pop(before)
            state.setdefault(after, value)


def _recover(record: MapRecord, current: Tensors, change: Change) -> Tensors:
    try:
        return record.recover(current)
    except NoInverse as reason:
        names = ", ".join(record.map.targets.values())
        raise WeightsChanged(f"{names} cannot be carried back through {change.label}: {reason}.") from None


def _check_unmapped(change: Change, state: Mapping[str, torch.Tensor]) -> None:
    for name, mark in change.fingerprints.items():
        if name in state and not state[name].is_meta and fingerprint(state[name]) != mark:
            raise WeightsChanged(
                f"{name}, which {change.label} made, was changed since, and the transformation does not say how to "
                f"carry that back, so the original checkpoint is not known. Undo with weights='original' first."
            )
    for name, mark in change.computed_from.items():
        if name in state and not state[name].is_meta and fingerprint(state[name]) != mark:
            raise WeightsChanged(
                f"{name} was changed after {change.label} had computed constants from it, so it is not known which of "
                f"both the checkpoint shall hold. Undo with weights='original' first."
            )


# --- the modules of the original -----------------------------------------------------------------------------------


class OriginalModules:
    """The original's modules on the meta device; torch's own loading runs on them, hooks and reports included."""

    def __init__(self, gm: GraphModule) -> None:
        self._root = _original_modules(gm)
        self._places = [(name, table, key, table[key]) for name, table, key in tensor_places(self._root)]
        self.tensors = {name: tensor for name, _, _, tensor in self._places}
        state = self._root.state_dict(keep_vars=True)
        self.keys = list(state)
        """The keys of a checkpoint, in order: those of tensors, and those of further state that modules keep."""
        self.metadata = getattr(state, "_metadata", None)

    @staticmethod
    def holder(gm: GraphModule, key: str) -> nn.Module:
        """The module whose further state a key stands for."""
        return gm.get_submodule(key.rpartition(".")[0])

    def load(self, state_dict: Mapping[str, Any], strict: bool) -> tuple[Any, Tensors]:
        """Torch's outcome of loading a checkpoint, and the given tensors by their names in the original."""
        given: OrderedDict[str, Any] = OrderedDict(state_dict)
        # torch notes `assign` in the checkpoint's own metadata, where a later load of it would find it
        given._metadata = copy.deepcopy(getattr(state_dict, "_metadata", None))  # type: ignore[attr-defined]
        try:
            outcome = self._root.load_state_dict(given, strict=strict, assign=True)
        except RuntimeError as error:
            raise CheckpointMismatch(f"{error}\nNothing was loaded.") from None
        return outcome, {name: table[key] for name, table, key, was in self._places if table[key] is not was}


def _original_modules(gm: GraphModule) -> nn.Module:
    """The modules that a module had before all that its history holds, on the meta device, without its graph: for
    names, shapes, ties and the order of a checkpoint. (The graph would cost most of the time.)"""
    memo, past = converted_tensors(gm, on_meta), history(gm)
    tables = {name: dict(fx_private.table(gm, name)) for name in fx_private.TABLES}
    root: nn.Module = type(type(gm).__name__, (nn.Module,), {})()
    for name, entries in tables.items():
        fx_private.table(root, name).update(_on_meta(entries, memo))
    hidden = fx_private.plain_attributes(gm).get("_non_persistent_buffers_set", set())
    fx_private.set_plain_attribute(root, "_non_persistent_buffers_set", set(hidden))
    for change in reversed(past.changes):
        assert past.initial_order is not None
        stored = {place: replace(table, before=_on_meta(table.before, memo)) for place, table in change.tables.items()}
        put_modules_back(root, replace(change, tables=stored), recover_tensors(root, change), past.initial_order)
    for module in root.modules():
        fx_private.forget_fsdp_hooks(module)
    return root


def _on_meta(value: Any, memo: dict[int, Any]) -> Any:
    """A copy on the meta device of a module, a tensor, a stored module, or a dictionary of them. One thing has one
    copy, which `memo` has by the thing's id. Copies share their attributes where loading does not write into them."""
    if isinstance(value, dict):
        return {key: _on_meta(entry, memo) for key, entry in value.items()}
    if isinstance(value, StoredModule):
        return StoredModule(value.cls, value.attributes, _on_meta(value.tables, memo), Handle())
    if not isinstance(value, nn.Module) or not _loads_plainly(value):
        return copy.deepcopy(value, memo)
    if id(value) not in memo:
        tables = {name: _on_meta(fx_private.table(value, name), memo) for name in fx_private.TABLES}
        memo[id(value)] = fx_private.module_like(_own_class(value), vars(value), tables)
    return memo[id(value)]


def _loads_plainly(module: nn.Module) -> bool:
    """Whether loading a checkpoint runs no code of the module's own, which might write into what copies share."""
    if is_fully_sharded(module):
        return True  # its hooks only let modules hold their shards, as they do already
    if isinstance(module, torch.jit.ScriptModule) or fx_private.has_hooks(module):
        return False
    return not fx_private.loads_by_itself(module) or type(module).__module__.startswith("torch.nn.modules.")


def _own_class(module: nn.Module) -> type[nn.Module]:
    return fx_private.class_before_fsdp(module) if is_fully_sharded(module) else type(module)
