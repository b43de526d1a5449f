"""What a checkpoint of the original holds, told by the names in a history alone: no module is built for it.

A checkpoint that fits an outline exactly can be loaded at once. For any other, torch's own loading (on a module without
memory, see `checkpoints`) says what is wrong; and for modules that load in a way of their own there is no outline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold import fx_private
from refold.change import Change, join_path
from refold.history import History
from refold.keeping import Husk
from refold.weights import MapRecord

_HIDDEN = "_non_persistent_buffers_set"
_HOOKS = ("_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


@dataclass(frozen=True)
class Kind:
    """What can be said about a tensor without having it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Outline:
    """Every tensor of the original by name, and those that no checkpoint holds."""

    named: dict[str, Kind]
    hidden: set[str]

    def fits(self, state_dict: Mapping[str, Any]) -> bool:
        """Whether a checkpoint has just the right names, and plain tensors of the right shapes under them."""
        if len(state_dict) != len(self.named) - len(self.hidden & self.named.keys()):
            return False
        return all(
            name in self.named
            and name not in self.hidden
            and type(tensor) in (torch.Tensor, nn.Parameter)
            and tensor.layout == torch.strided
            and not tensor.is_meta
            and tuple(tensor.shape) == self.named[name].shape
            for name, tensor in state_dict.items()
        )


def outline_of(gm: GraphModule, past: History) -> Outline | None:
    """The outline of what a module was before its history; None where only its modules can tell."""
    outline = Outline({}, set())
    for path, module in fx_private.walk_modules(gm):
        if not _note(outline, path, type(module), vars(module)):
            return None
    for change in reversed(past.changes):
        if change.prints or not _go_back(outline, change):
            return None
    return outline


def _go_back(outline: Outline, change: Change) -> bool:
    """Turn an outline of what a change made into one of what it was made from."""
    for record in reversed(change.maps):
        made = {role: outline.named.pop(name, None) for role, name in record.map.targets.items()}
        if None in made.values():
            return False
        outline.named |= _sources(record, made)
    outline.named |= {name: outline.named[now] for name, now in change.passed.items() if now in outline.named}
    for (path, table), entry in change.tables.items():
        if path in change.attributes and _HIDDEN in change.attributes[path]:
            return False
        known = list(_held(table, path, entry.before.items()))
        if not all(_note(outline, *facts) for facts in known):
            return False
    return True


def _sources(record: MapRecord, made: Mapping[str, Any]) -> dict[str, Kind]:
    structural = record.map.operation.structural
    own = next((kind.dtype for kind in made.values()), None)
    found: dict[str, Kind] = {}
    for role, name in record.map.sources.items():
        dtype = own if structural and own is not None else record.dtype_now(role, made)
        found[name] = Kind(record.specs[role].shape, dtype)
    return found


def _held(
    table: str, path: str, entries: Iterable[tuple[str, Any]]
) -> Iterator[tuple[str, type[nn.Module], Mapping[str, Any]]]:
    """(path, class, attributes and tables) of all that a change keeps of the modules it took out."""
    loose: dict[str, Any] = {}
    for key, value in entries:
        here = join_path(path, key)
        if isinstance(value, Husk):
            yield here, value.cls, {**value.attributes, **value.tables}
            yield from _held("_modules", here, value.tables["_modules"].items())
        elif isinstance(value, nn.Module):
            yield from (
                (join_path(here, p) if p else here, type(m), vars(m)) for p, m in fx_private.walk_modules(value)
            )
        elif isinstance(value, torch.Tensor):
            loose[key] = value
    if loose:
        yield path, nn.Module, {table: loose}


def _note(outline: Outline, path: str, cls: type[nn.Module], facts: Mapping[str, Any]) -> bool:
    """Note the tensors of one module; False where it loads in a way of its own."""
    if issubclass(cls, torch.jit.ScriptModule) or any(facts.get(name) for name in _HOOKS):
        return False
    if cls._load_from_state_dict is not nn.Module._load_from_state_dict and not _is_torchs_own(cls):
        return False
    if cls.get_extra_state is not nn.Module.get_extra_state:
        return False
    for table in ("_parameters", "_buffers"):
        for key, tensor in facts.get(table, {}).items():
            if isinstance(tensor, torch.Tensor):
                outline.named[join_path(path, key)] = Kind(tuple(tensor.shape), tensor.dtype)
    outline.hidden |= {join_path(path, key) for key in facts.get(_HIDDEN, ())}
    return True


def _is_torchs_own(cls: type[nn.Module]) -> bool:
    """Whether a class loads in a way of torch's own, which only matters where entries are missing."""
    return cls.__module__.startswith("torch.nn.modules.")
