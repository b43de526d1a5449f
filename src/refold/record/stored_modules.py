"""How a change stores what it removed: by reference, or without the weights that undoing it gives back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from refold import fx_private
from refold.weights.maps import Handle


@dataclass(frozen=True)
class Placeholder:
    """The place of a tensor that a weight map gives back or that was retained, by its full name before the change."""

    name: str


@dataclass
class StoredModule:
    """A removed module without the tensors that are given back when the change is undone."""

    cls: type[nn.Module]
    attributes: dict[str, Any]
    tables: dict[str, dict[str, Any]]
    original: Handle

    def revive(self, tensors: dict[str, torch.Tensor]) -> nn.Module:
        """The module again: the original object if it lives and holds just these tensors, else one like it."""
        tables = {name: {k: revive(v, tensors) for k, v in table.items()} for name, table in self.tables.items()}
        original: nn.Module | None = self.original.get()
        if original is not None and _holds(original, tables):
            return original
        return fx_private.module_like(self.cls, fx_private.with_own_containers(self.attributes), tables)


def _holds(module: nn.Module, tables: dict[str, dict[str, Any]]) -> bool:
    def same(name: str, entries: dict[str, Any]) -> bool:
        live = fx_private.table(module, name)
        return list(live) == list(entries) and all(live[k] is v for k, v in entries.items())

    return all(same(name, entries) for name, entries in tables.items())


def with_holders(names: Iterable[str]) -> set[str]:
    """Names of tensors, and the paths of all modules that hold one of them."""
    found: set[str] = set()
    for name in names:
        while name and name not in found:
            found.add(name)
            name = name.rpartition(".")[0]
    return found


def store_entry(value: Any, path: str, given_back: set[str]) -> Any:
    """What to store of a removed table entry, so that tensors in `given_back` (see `with_holders`) are not held."""
    if isinstance(value, torch.Tensor):
        return Placeholder(path) if path in given_back else value
    if not isinstance(value, nn.Module) or isinstance(value, torch.jit.ScriptModule):
        return value
    if path not in given_back:
        return value
    prefix = path + "."
    tables = {
        name: {k: store_entry(v, prefix + k, given_back) for k, v in fx_private.table(value, name).items()}
        for name in fx_private.TABLES
    }
    attributes = fx_private.with_own_containers(fx_private.plain_attributes(value))
    return StoredModule(type(value), attributes, tables, Handle(value))


def revive(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """A stored table entry, alive again."""
    if isinstance(value, Placeholder):
        return tensors[value.name]
    return value.revive(tensors) if isinstance(value, StoredModule) else value


def held_tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a table entry, stored or alive, by the name it has if the entry stands at a path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, nn.Module):
        for name, tensor in fx_private.registered_tensors(value).items():
            yield fx_private.join_path(path, name), tensor
    elif isinstance(value, StoredModule):
        for table in value.tables.values():
            for key, entry in table.items():
                yield from held_tensors(entry, fx_private.join_path(path, key))
