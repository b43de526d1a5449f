"""How a change keeps what it removed: by reference, or as husks without the weights that undoing it gives back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from refold import fx_private
from refold.weights import Handle


@dataclass(frozen=True)
class Slot:
    """The place of a tensor that a weight map gives back or that was passed on, by its full name before the change."""

    name: str


@dataclass
class Husk:
    """A removed module without the tensors that are given back when the change is undone."""

    cls: type[nn.Module]
    attributes: dict[str, Any]
    tables: dict[str, dict[str, Any]]
    original: Handle

    def revive(self, tensors: dict[str, torch.Tensor]) -> nn.Module:
        """The module again: the original object if it lives and holds just these tensors, else a twin of it."""
        tables = {name: {k: revive(v, tensors) for k, v in table.items()} for name, table in self.tables.items()}
        original: nn.Module | None = self.original.get()
        if original is not None and _holds(original, tables):
            return original
        twin = fx_private.empty_module(self.cls, {k: _own(v) for k, v in self.attributes.items()})
        for name, entries in tables.items():
            fx_private.table(twin, name).update(entries)
        return twin


def _own(value: Any) -> Any:
    """Hook tables and sets belong to one module; everything else is shared as it was."""
    if not isinstance(value, dict | set):
        return value
    return value.copy() if value else type(value)()  # nearly all are empty, and copying is slow


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


def keep(value: Any, path: str, given_back: set[str]) -> Any:
    """What to store of a removed table entry, so that tensors in `given_back` (see `with_holders`) are not held."""
    if isinstance(value, torch.Tensor):
        return Slot(path) if path in given_back else value
    if not isinstance(value, nn.Module) or isinstance(value, torch.jit.ScriptModule):
        return value
    if path not in given_back:
        return value
    prefix = path + "."
    tables = {
        name: {k: keep(v, prefix + k, given_back) for k, v in fx_private.table(value, name).items()}
        for name in fx_private.TABLES
    }
    attributes = {k: _own(v) for k, v in fx_private.plain_attributes(value).items()}
    return Husk(type(value), attributes, tables, Handle(value))


def revive(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """A stored table entry, alive again."""
    if isinstance(value, Slot):
        return tensors[value.name]
    return value.revive(tensors) if isinstance(value, Husk) else value


def held_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor that a stored entry holds."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, Husk):
        for table in value.tables.values():
            for entry in table.values():
                yield from held_tensors(entry)
