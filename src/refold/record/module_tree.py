"""All modules of a model at one moment. The record is flat, so that comparing costs little; single modules come out of
it on demand: nearly every module is as it was when a transformation is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from refold import fx_private
from refold.record.containers import (
    KINDS,
    ContainerCopies,
    FormerItems,
    copy_nested,
    inside,
    same_items,
)
from refold.record.nodes import MISSING, same_value


class ModuleRecord:
    """What one module had, by reference; of its tables and other containers, what they held."""

    __slots__ = ("cls", "everything", "former", "module")

    def __init__(
        self, module: nn.Module, cls: type[nn.Module], everything: dict[str, Any], former: Mapping[int, Any]
    ) -> None:
        self.module = module
        self.cls = cls
        self.everything = everything
        self.former = former
        """Copies of containers that held something, by the id of the container."""

    @classmethod
    def of(cls, module: nn.Module) -> ModuleRecord:
        """One module as it is now."""
        everything = vars(module).copy()
        held = [(value, value.copy()) for value in everything.values() if type(value) in KINDS and value]
        return cls(module, type(module), everything, {id(container): copy for container, copy in held})

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        """The entries of the tables of parameters, buffers and children; none of a scripted module."""
        if isinstance(self.module, torch.jit.ScriptModule):
            return {}
        return {name: self.former.get(id(self.everything[name]), {}) for name in fx_private.TABLES}

    @property
    def attributes(self) -> dict[str, Any]:
        """The plain attributes."""
        return fx_private.without_tables(self.module, self.everything)

    def named_tensors(self, path: str) -> dict[str, torch.Tensor]:
        """The parameters and buffers, by their full names if the module stands at a path."""
        prefix, tables = path + "." if path else "", self.tables
        entries = chain.from_iterable(tables[name].items() for name in ("_parameters", "_buffers") if tables)
        return {prefix + key: tensor for key, tensor in entries if tensor is not None}

    def changed_attributes(self, written: bool) -> dict[str, Any]:
        """The plain attributes that the module no longer has as they were here, as they were here; `written` says that
        containers may have been written into."""
        changed: dict[str, Any] = {} if type(self.module) is self.cls else {"__class__": self.cls}
        if not written and same_items(vars(self.module), self.everything):
            return changed
        old, new = self.attributes, fx_private.plain_attributes(self.module)
        for name in {**old, **new}:
            then, now = old.get(name, MISSING), new.get(name, MISSING)
            before = copy_nested(then, self.former) if written and type(then) in KINDS else then
            if not same_value(before, now):
                changed[name] = then if same_value(before, then) else FormerItems(before)
        return changed

    def has_children_of(self, other: ModuleRecord) -> bool:
        """Whether a module had the same children at another moment."""
        mine, theirs = (record.tables.get("_modules", {}) for record in (self, other))
        return list(mine) == list(theirs) and all(map(is_, mine.values(), theirs.values()))


class ModuleTree:
    """All modules below a module, also under a second path, at one moment."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.paths, self.modules = fx_private.all_modules(root)
        self._classes = list(map(type, self.modules))
        self._attributes = [module.__dict__.copy() for module in self.modules]
        self._containers = [value for copy in self._attributes for value in copy.values() if type(value) in KINDS]
        self._held = ContainerCopies(filter(None, self._containers))
        self._inside = ContainerCopies(inside(self._held.live))
        self.tensors = fx_private.tensors_of(self.modules)
        """The parameters, then the buffers, of all modules in order."""

    @cached_property
    def _table_ids(self) -> set[int]:
        tables = [attributes.get(name) for attributes in self._attributes for name in fx_private.TABLES]
        return {id(table) for table in tables if table is not None}

    @cached_property
    def _former(self) -> dict[int, Any]:
        return self._held.by_id() | self._inside.by_id()

    def record(self, place: int) -> ModuleRecord:
        """One of the modules as it was."""
        return ModuleRecord(self.modules[place], self._classes[place], self._attributes[place], self._former)

    # --- what is no longer as it was ---------------------------------------------------------------------------------

    def written(self) -> set[int]:
        """The ids of containers that hold something else than they did."""
        filled = list(filter(None, self._containers))
        found: set[int] = set()
        if len(filled) != len(self._held.live) or not all(map(is_, filled, self._held.live)):
            found = {id(container) for container in filled if id(container) not in self._former}
        found |= set(map(id, self._held.written()))
        if self._inside.written():  # in which of them does not matter
            found |= set(map(id, self._held.live)) - self._table_ids
        return found

    def beside_tables(self, written: set[int]) -> bool:
        """Whether any of some containers is not a table."""
        return bool(written) and not written <= self._table_ids

    def changed_modules(self, written: set[int]) -> dict[str, ModuleRecord]:
        """Modules as they are now, by path: all that are new there, or not as they were."""
        touched = self._touched(written)
        now = {self.paths[place]: ModuleRecord.of(self.modules[place]) for place in touched}
        before = (self.record(place) for place in touched)
        if all(map(ModuleRecord.has_children_of, now.values(), before)):
            return now  # no module came or went
        known = dict(zip(self.paths, self.modules, strict=True))
        found = {}
        for path, module in fx_private.walk_modules(self.root):
            if known.get(path) is not module:
                found[path] = ModuleRecord.of(module)
            elif path in now:
                found[path] = now[path]
        return found

    def record_at(self, path: str) -> ModuleRecord | None:
        """The module that stood at a path, as it was."""
        place = self._places.get(path)
        return None if place is None else self.record(place)

    @cached_property
    def _places(self) -> dict[str, int]:
        return dict(zip(self.paths, range(len(self.paths)), strict=True))

    def _touched(self, written: set[int]) -> list[int]:
        """The places of modules that are not, or may not be, as they were."""
        return [place for place in range(len(self.modules)) if not self._is_same(place, written)]

    def _is_same(self, place: int, written: set[int]) -> bool:
        if type(self.modules[place]) is not self._classes[place]:
            return False
        before, now = self._attributes[place], self.modules[place].__dict__
        if not same_items(now, before):
            return False
        return not written or written.isdisjoint(map(id, before.values()))

    # --- putting back ------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Put all modules back as they were. Can be called again."""
        for place in self._touched(self.written()):
            if type(self.modules[place]) is not self._classes[place]:
                self.modules[place].__class__ = self._classes[place]
            fx_private.put_attributes_back(self.modules[place], self._attributes[place])
        former = self._former
        for container in self._containers:
            if container and id(container) not in former:
                container.clear()
        self._held.restore()
        self._inside.restore()
