"""The difference of two states of a module: it describes itself, and knows what it read and wrote."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch.fx.node import map_aggregate

from refold.fx_private import join_path
from refold.record.nodes import MISSING, NodeRecord, Ref
from refold.record.stored_modules import held_tensors
from refold.weights.maps import MapRecord


@dataclass
class TableChange:
    """What happened to one table of one module: entries as they were, and the order of keys as it was."""

    before: dict[str, Any]
    added: tuple[str, ...]
    order: tuple[str, ...]


class Touching(Protocol):
    """A later change, or an edit made by hand."""

    @property
    def writes(self) -> frozenset[str]: ...

    @property
    def reads(self) -> frozenset[str]: ...


@dataclass
class Change:
    """What one transformation did to one module."""

    signature: int
    name: str
    label: str
    created: dict[str, NodeRecord]
    erased: dict[str, NodeRecord]
    changed: dict[str, tuple[NodeRecord, NodeRecord]]
    moved: tuple[str, ...]
    order: tuple[str, ...]
    tables: dict[tuple[str, str], TableChange]
    attributes: dict[str, dict[str, Any]]
    metas: dict[str, dict[str, Any]]
    names_added: frozenset[str]
    counts: dict[str, Any]
    training: bool
    codegen: Any = MISSING
    maps: tuple[MapRecord, ...] = ()
    retained: dict[str, str] = field(default_factory=dict)
    """Tensors that stayed although what held them was removed: the name they had, and one that they had afterwards."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    computed_from: dict[str, str] = field(default_factory=dict)
    """Fingerprints of weights that stayed, and that constants were computed from: the graph does not follow them."""
    trainable: dict[str, bool] = field(default_factory=dict)
    """Tensors that stayed and were frozen, or no longer: whether they were trainable before."""
    groups: tuple[tuple[int, int], ...] = ()
    marked: frozenset[str] = frozenset()
    sites: tuple[Any, ...] = ()
    recipe: dict[str, Any] | None = None
    """The class path and settings of the transformation as plain data; None where they are not plain."""

    # --- what it touched -------------------------------------------------------------------------------------------

    @property
    def writes(self) -> frozenset[str]:
        """Nodes ("%name"), module entries (paths) and attributes of the module itself ("@name") that this change made,
        removed, changed or moved."""
        nodes = {f"%{n}" for n in (*self.created, *self.erased, *self.changed, *self.moved)}
        entries = {join_path(path, k) for (path, _), t in self.tables.items() for k in (*t.before, *t.added)}
        attributes = {path for path in self.attributes if path} | {f"@{name}" for name in self.attributes.get("", ())}
        return frozenset(nodes | entries | attributes | set(self.trainable))

    @property
    def reads(self) -> frozenset[str]:
        """Nodes and module entries that the nodes it touched refer to, and tensors that it retained."""
        found: set[str] = set(self.retained.values())
        for record in self._records():
            found |= refs_in(record)
            if record.op in ("call_module", "get_attr"):
                found.add(record.target)
        return frozenset(found)

    def _records(self) -> Iterator[NodeRecord]:
        yield from self.created.values()
        yield from self.erased.values()
        for before, after in self.changed.values():
            yield before
            yield after

    @property
    def renamed(self) -> dict[str, str]:
        """Of the tensors that it retained, those that no longer have the name they had."""
        return {before: after for before, after in self.retained.items() if before != after}

    def conflicts_with(self, later: Touching) -> bool:
        """Whether something later stands in the way of undoing this change."""
        mine = self.writes
        return overlap(later.writes, mine | self.reads) or overlap(mine, later.reads)

    @property
    def nbytes(self) -> int:
        """The bytes of tensors and corrections held for undoing."""
        held = {id(tensor): tensor for _name, tensor in self.held_tensors()}
        return sum(t.numel() * t.element_size() for t in held.values()) + sum(m.nbytes for m in self.maps)

    def held_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that this change removed and holds, because no weight map gives them back, by the names they
        had."""
        for (path, _table), entry in self.tables.items():
            for key, value in entry.before.items():
                yield from held_tensors(value, join_path(path, key))

    def describe(self) -> list[str]:
        """One line each: `-` was removed, `+` was added, `~` was changed, then the weight maps."""
        lines = [f"- {r}" for r in self.erased.values()] + [f"+ {r}" for r in self.created.values()]
        lines += [f"~ {before}  ->  {after}" for before, after in self.changed.values()]
        lines += [f"~ {name} moved" for name in self.moved]
        for (path, _table), entry in self.tables.items():
            lines += [f"{'~' if k in entry.added else '-'} {join_path(path, k)}" for k in entry.before]
            lines += [f"+ {join_path(path, k)}" for k in entry.added if k not in entry.before]
        lines += [f"~ {path or 'the module'}: {', '.join(changed)}" for path, changed in self.attributes.items()]
        lines += [f"~ {name}: requires_grad was {trainable}" for name, trainable in self.trainable.items()]
        return lines + [f"  {record.map}" for record in self.maps]

    def without_metas(self) -> Change:
        """For pickling: node metadata holds what cannot be pickled, and torch drops it as well."""
        return replace(self, metas={}, codegen=MISSING)

    def __deepcopy__(self, memo: dict[int, Any]) -> Change:
        shared = {"metas": {k: dict(v) for k, v in self.metas.items()}, "codegen": self.codegen}
        parts = ("tables", "attributes", "maps", "fingerprints")
        return replace(self, **shared, **{name: copy.deepcopy(getattr(self, name), memo) for name in parts})


def refs_in(record: NodeRecord) -> set[str]:
    """The nodes, as "%name", that a record's arguments refer to."""
    found: set[str] = set()

    def note(value: Any) -> Any:
        if isinstance(value, Ref):
            found.add(f"%{value.name}")
        return value

    map_aggregate((record.args, record.kwargs), note)
    return found


def overlap(left: frozenset[str], right: frozenset[str]) -> bool:
    """Whether two sets share a node, or a module entry of one lies at or inside one of the other."""
    return any(_ancestors(x) & right for x in left) or any(_ancestors(x) & left for x in right)


def _ancestors(path: str) -> set[str]:
    parts = path.split(".")
    return {".".join(parts[: i + 1]) for i in range(len(parts))}


@dataclass
class InitialOrder:
    """How the module was when its history began: what everything returns to once all is undone."""

    nodes: tuple[str, ...]
    tables: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    users: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The users of nodes that had theirs in another order than the graph's."""

    def with_tables_of(self, change: Change) -> InitialOrder:
        """Also remember the tables that a further change touches for the first time."""
        fresh = {key: entry.order for key, entry in change.tables.items() if key not in self.tables}
        return InitialOrder(self.nodes, self.tables | fresh, self.users)
