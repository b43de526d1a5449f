"""Derive a change from two photographs of a module: whatever edits were made, what they add up to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.fx.node import map_aggregate

from refold import fx_private
from refold.change import Change, TableChange, join_path
from refold.fingerprint import same_bits
from refold.keeping import keep, with_holders
from refold.snapshot import MISSING, ModuleRecord, NodeRecord, Ref, Snapshot, same_value
from refold.weights import MapRecord

_Pairs = list[tuple[str, ModuleRecord, ModuleRecord]]
_FIELDS = ("op", "target", "args", "kwargs", "type")


def difference(before: Snapshot, after: Snapshot, maps: Iterable[MapRecord] = ()) -> Change | None:
    """The change from one photograph to another; None where nothing differs. The second may be of another module (a
    transformation returned a copy): entries are then the same when they are alike, not only when they are identical."""
    maps = tuple(maps)
    old, new = before.nodes, after.nodes
    names = {node: name for name, (node, _) in old.items()}
    erased = {name: _record(old[name][1], names) for name in old if name not in new}
    created = {name: _record(new[name][1], None) for name in new if name not in old}
    changed = dict(_changed_nodes(old, new, names))
    mapped = with_holders(name for record in maps for name in record.map.sources.values())
    suspects = _same_modules(before, after)
    copied = before.modules[""].module is not after.modules[""].module
    tables = _changed_tables(suspects, copied, mapped)
    attributes = _changed_attributes(suspects)
    moved = _moved([n for n in old if n in new], [n for n in new if n in old])
    codegen = MISSING if before.codegen is after.codegen else before.codegen
    if not (erased or created or changed or tables or attributes or moved) and codegen is MISSING:
        return None
    counts = {k: before.base_counts.get(k, MISSING) for k, v in after.base_counts.items() if _differs(before, k, v)}
    metas = _changed_metas(old, new) | {name: dict(old[name][1][6]) for name in erased}
    training = bool(before.modules[""].attributes.get("training", False))
    return Change(
        signature=0,
        name="",
        label="",
        created=created,
        erased=erased,
        changed=changed,
        moved=tuple(moved),
        order=tuple(old),
        tables=tables,
        attributes=attributes,
        metas=metas,
        names_added=frozenset(after.used_names - before.used_names),
        counts=counts,
        training=training,
        codegen=codegen,
        maps=maps,
    )


def _differs(before: Snapshot, name: str, count: int) -> bool:
    return before.base_counts.get(name) != count


def _record(fields: tuple[Any, ...], names: dict[Node, str] | None) -> NodeRecord:
    """A photographed node as plain data; `names` gives the names nodes had at that moment."""

    def refer(value: Any) -> Any:
        if not isinstance(value, Node):
            return value
        return Ref(value.name if names is None else names.get(value, value.name))

    name, op, target, args, kwargs, type_ = fields[:6]
    return NodeRecord(name, op, target, map_aggregate(args, refer), map_aggregate(kwargs, refer), type_)


def _changed_nodes(
    old: dict[str, Any], new: dict[str, Any], names: dict[Node, str]
) -> Iterator[tuple[str, tuple[NodeRecord, NodeRecord]]]:
    for name, (node, fields) in old.items():
        if name not in new:
            continue
        new_node, new_fields = new[name]
        if node is new_node and all(map(is_, fields[1:6], new_fields[1:6])):
            continue
        before, after = _record(fields, names), _record(new_fields, None)
        if not all(same_value(getattr(before, f), getattr(after, f)) for f in _FIELDS):
            yield name, (before, after)


def _changed_metas(old: dict[str, Any], new: dict[str, Any]) -> dict[str, dict[str, Any]]:
    changed = {}
    for name, (_, fields) in old.items():
        if name not in new:
            continue
        before, after = fields[6], new[name][1][6]
        if before.keys() == after.keys() and all(map(is_, before.values(), map(after.get, before))):
            continue
        keys = [k for k in {**before, **after} if before.get(k, MISSING) is not after.get(k, MISSING)]
        changed[name] = {k: before.get(k, MISSING) for k in keys}
    return changed


def _same_modules(before: Snapshot, after: Snapshot) -> _Pairs:
    """Modules that stand at the same path in both photographs and may differ."""
    copied = before.modules[""].module is not after.modules[""].module
    found, others = [], after.modules
    for path, record in before.modules.items():
        other = others.get(path)
        if other is None or (not copied and record.module is other.module and record.is_untouched()):
            continue
        if path == "" or _same_entry(record.module, other.module, copied):
            found.append((path, record, other))
    return found


def _same_entry(old: Any, new: Any, copied: bool) -> bool:
    if old is new or not copied:
        return old is new
    if isinstance(old, torch.Tensor):
        return isinstance(new, torch.Tensor) and same_bits(old, new)
    return isinstance(old, nn.Module) and type(old) is type(new)


def _changed_tables(suspects: _Pairs, copied: bool, mapped: set[str]) -> dict[tuple[str, str], TableChange]:
    changed = {}
    for path, record, other in suspects:
        for name, entries in record.tables.items():
            if not entries and not other.tables[name]:
                continue
            old, new = _without_history(path, entries), _without_history(path, other.tables[name])
            if not copied and list(old) == list(new) and all(map(is_, old.values(), new.values())):
                continue
            gone = {k: v for k, v in old.items() if k not in new or not _same_entry(v, new[k], copied)}
            added = tuple(k for k, v in new.items() if k not in old or k in gone)
            if gone or added or list(old) != list(new):
                kept = {k: keep(v, join_path(path, k), mapped) for k, v in gone.items()}
                changed[path, name] = TableChange(kept, added, tuple(old))
    return changed


def _without_history(path: str, entries: dict[str, Any]) -> dict[str, Any]:
    return entries if path else {k: v for k, v in entries.items() if k != fx_private.HISTORY_CHILD}


def _changed_attributes(suspects: _Pairs) -> dict[str, dict[str, Any]]:
    changed = {}
    for path, record, other in suspects:
        if other.module is not record.module:
            continue  # a copy came back: its attributes are its own
        found = record.changed_attributes()
        if found:
            changed[path] = found
    return changed


def _moved(old: list[str], new: list[str]) -> list[str]:
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
