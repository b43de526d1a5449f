"""Derive a change from two states of a module: whatever edits were made, what they add up to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from refold import fx_private
from refold.fingerprint import same_bits
from refold.fx_private import join_path, named_tensors
from refold.record.change import Change, TableChange
from refold.record.containers import same_items
from refold.record.module_tree import ModuleRecord
from refold.record.nodes import MISSING, NodeRecord, record_row, same_value
from refold.record.snapshot import LaterState, Snapshot
from refold.record.stored_modules import held_tensors, store_entry, with_holders
from refold.weights.maps import MapRecord

_Pairs = list[tuple[str, ModuleRecord, ModuleRecord]]


def difference(before: Snapshot, after: LaterState, maps: Iterable[MapRecord] = ()) -> Change | None:
    """The change from a snapshot to a later state; None where nothing differs. The second may be of another module (a
    transformation returned a copy): entries are then the same when they are alike, not only when they are identical."""
    maps = tuple(maps)
    nodes = _edits_of_nodes(before, after)
    suspects = _same_modules(before, after)
    tables = _changed_tables(suspects, after.root is not before.tree.root)
    mapped = {name for record in maps for name in record.map.sources.values()}
    retained = retained_tensors(_removed_tensors(tables, mapped), after.root)
    _keep_removed(tables, with_holders(mapped | retained.keys()))
    attributes = _changed_attributes(suspects, after.written)
    codegen = MISSING if before.graph.codegen is after.graph.codegen else before.graph.codegen
    trainable = before.changed_trainable()
    if not (any(nodes.values()) or tables or attributes or trainable) and codegen is MISSING:
        return None
    return Change(
        signature=0,
        name="",
        label="",
        **nodes,
        order=tuple(before.nodes),
        tables=tables,
        attributes=attributes,
        metas=_changed_metas(before, after),
        names_added=frozenset(after.used_names - before.graph.used_names),
        counts=_changed_counts(before.graph.base_counts, after.base_counts),
        training=bool(before.tree.record(0).everything.get("training", False)),
        codegen=codegen,
        maps=maps,
        retained=retained,
        trainable=trainable,
    )


def _edits_of_nodes(before: Snapshot, after: LaterState) -> dict[str, Any]:
    """What happened to nodes, as the fields of a change."""
    old, new = before.nodes, after.nodes
    names = {row[0]: row[1] for row in before.graph.rows}
    changed = dict(_changed_nodes(old, new, names, _readers_of_renamed(after, names)))
    if list(old) == list(new):
        return {"erased": {}, "created": {}, "changed": changed, "moved": ()}
    erased = {name: record_row(old[name], names) for name in old if name not in new}
    created = {name: record_row(new[name]) for name in new if name not in old}
    moved = moved_names([n for n in old if n in new], [n for n in new if n in old])
    return {"erased": erased, "created": created, "changed": changed, "moved": tuple(moved)}


def _changed_counts(old: dict[str, int], new: dict[str, int]) -> dict[str, Any]:
    """The counters that are not as they were, as they were."""
    return {} if old == new else {k: old.get(k, MISSING) for k, v in new.items() if old.get(k) != v}


def _readers_of_renamed(after: LaterState, names: dict[Node, str]) -> set[Node]:
    """The nodes that read one which has another name now: their arguments are other names too."""
    renamed = [row[0] for row in after.graph.rows if names.get(row[0], row[1]) != row[1]]
    return {user for node in renamed for user in node.users}


def _changed_nodes(
    old: dict[str, fx_private.Row], new: dict[str, fx_private.Row], names: dict[Node, str], suspects: set[Node]
) -> Iterator[tuple[str, tuple[NodeRecord, NodeRecord]]]:
    for name, row in old.items():
        new_row = new.get(name)
        if new_row is None or (new_row is row and row[0] not in suspects):
            continue
        before, after = record_row(row, names), record_row(new_row)
        if not _same_record(before, after):
            yield name, (before, after)


def _same_record(a: NodeRecord, b: NodeRecord) -> bool:
    same = same_value(a.target, b.target) and a.op == b.op and same_value(a.type, b.type)
    return same and same_value(a.args, b.args) and same_value(a.kwargs, b.kwargs)


def _changed_metas(before: Snapshot, after: LaterState) -> dict[str, dict[str, Any]]:
    """What was different in the metadata of nodes that stay, and the whole of those that were erased."""
    names, old, new = list(before.nodes), before.graph.metas, after.graph.metas
    if names != list(after.nodes):
        by_name = dict(zip(after.nodes, new, strict=True))
        new = [by_name.get(name, {}) for name in names]
    rows = zip(names, old, new, strict=True)
    return {name: _changed_entries(then, now) for name, then, now in rows if not same_items(then, now)}


def _changed_entries(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What is not as it was, as it was."""
    return {k: old.get(k, MISSING) for k in {**old, **new} if old.get(k, MISSING) is not new.get(k, MISSING)}


def _same_modules(before: Snapshot, after: LaterState) -> _Pairs:
    """Modules that stand at the same path in both states and may differ."""
    copied = after.root is not before.tree.root
    found = []
    for path, other in after.modules.items():
        record = before.tree.record_at(path)
        if record is not None and (path == "" or _same_entry(record.module, other.module, copied)):
            found.append((path, record, other))
    return found


def _same_entry(old: Any, new: Any, copied: bool) -> bool:
    if old is new or not copied:
        return old is new
    if isinstance(old, torch.Tensor):
        return isinstance(new, torch.Tensor) and same_bits(old, new)
    return isinstance(old, nn.Module) and type(old) is type(new)


def _changed_tables(suspects: _Pairs, copied: bool) -> dict[tuple[str, str], TableChange]:
    """What happened to the tables, with all that was removed from them."""
    changed = {}
    for path, record, other in suspects:
        others = other.tables
        for name, old in record.tables.items():
            new = others[name]
            if not old and not new:
                continue
            if not copied and list(old) == list(new) and all(map(is_, old.values(), new.values())):
                continue
            gone = {k: v for k, v in old.items() if k not in new or not _same_entry(v, new[k], copied)}
            added = tuple(k for k, v in new.items() if k not in old or k in gone)
            if gone or added or list(old) != list(new):
                changed[path, name] = TableChange(gone, added, tuple(old))
    return changed


def _removed_tensors(tables: dict[tuple[str, str], TableChange], mapped: set[str]) -> dict[str, torch.Tensor]:
    """The removed tensors that no weight map gives back, by the names they had."""
    removed = [(join_path(path, k), v) for (path, _), table in tables.items() for k, v in table.before.items()]
    return {name: t for path, value in removed for name, t in held_tensors(value, path) if name not in mapped}


def _keep_removed(tables: dict[tuple[str, str], TableChange], given_back: set[str]) -> None:
    """Let go of the removed tensors that are given back when the change is undone."""
    for (path, _), table in tables.items():
        table.before = {k: store_entry(v, join_path(path, k), given_back) for k, v in table.before.items()}


def _changed_attributes(suspects: _Pairs, written: bool) -> dict[str, dict[str, Any]]:
    changed = {}
    for path, record, other in suspects:
        if other.module is not record.module:
            continue  # a copy came back: its attributes are its own
        found = record.changed_attributes(written)
        if found:
            changed[path] = found
    return changed


def moved_names(old: list[str], new: list[str]) -> list[str]:
    """The fewest names whose move explains the new order: those outside a longest increasing subsequence."""
    if old == new:
        return []
    position = {name: i for i, name in enumerate(new)}
    sequence = [position[name] for name in old]
    tails: list[int] = []
    tail_at: list[int] = []
    previous: list[int] = []
    for i, value in enumerate(sequence):
        k = bisect_left(tails, value)
        tails[k : k + 1], tail_at[k : k + 1] = [value], [i]
        previous.append(tail_at[k - 1] if k else -1)
    kept, i = set(), tail_at[-1]
    while i >= 0:
        kept.add(i)
        i = previous[i]
    return [name for i, name in enumerate(old) if i not in kept]


def retained_tensors(removed: dict[str, torch.Tensor], root: nn.Module) -> dict[str, str]:
    """By the name that a removed tensor had: the name under which the module has the very same tensor now, its own if
    that is one of them."""
    if not removed:
        return {}
    wanted = {id(tensor) for tensor in removed.values()}
    places: dict[int, dict[str, None]] = {}
    for name, tensor in named_tensors(root).items():
        if id(tensor) in wanted:
            places.setdefault(id(tensor), {})[name] = None
    found = {name: places[id(tensor)] for name, tensor in removed.items() if id(tensor) in places}
    return {name: name if name in now else next(iter(now)) for name, now in found.items()}
