"""Undo a change: put its nodes, module tables and attributes back as they were."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from refold import fx_private
from refold.change import Change
from refold.contents import Contents
from refold.keeping import revive
from refold.snapshot import MISSING, Ref


def put_back(gm: GraphModule, change: Change, tensors: dict[str, torch.Tensor], birth: Birth) -> None:
    """Undo a change on a module: its nodes, then its tables, then its attributes. The caller guards atomicity."""
    _put_nodes_back(gm, change, birth)
    restored = put_modules_back(gm, change, tensors, birth)
    if gm.training != change.training and "training" not in change.attributes.get("", {}):
        for module in restored:
            module.train(gm.training)


@dataclass
class Birth:
    """How the module was when its history began: what everything returns to once all is undone."""

    nodes: tuple[str, ...]
    tables: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    users: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The users of nodes that had theirs in another order than the graph's."""

    def with_tables_of(self, change: Change) -> Birth:
        """Also remember the tables that a further change touches for the first time."""
        fresh = {key: entry.order for key, entry in change.tables.items() if key not in self.tables}
        return Birth(self.nodes, self.tables | fresh, self.users)


def _put_nodes_back(gm: GraphModule, change: Change, birth: Birth) -> None:
    graph = gm.graph
    by_name = {node.name: node for node in graph.nodes}
    fx_private.free_names(graph, change.erased)
    end = next(iter(reversed(graph.nodes)))
    for name, record in change.erased.items():
        with graph.inserting_before(end):
            by_name[name] = graph.create_node(record.op, record.target, (), {}, name, record.type)
        by_name[name].meta = dict(change.metas.get(name, {}))

    def resolve(value: Any) -> Any:
        return map_aggregate(value, lambda v: by_name[v.name] if isinstance(v, Ref) else v)

    for record in [*change.erased.values(), *(before for before, _ in change.changed.values())]:
        node = by_name[record.name]
        node.op, node.target, node.type = record.op, record.target, record.type
        node.args, node.kwargs = resolve(record.args), resolve(record.kwargs)
    for name, values in change.metas.items():
        if name not in change.erased:
            _put_meta_back(by_name[name], values)
    for name in reversed(change.created):
        graph.erase_node(by_name.pop(name))
    _put_order_back(by_name, change, birth)
    fx_private.free_names(graph, change.names_added)
    counts = fx_private.base_counts(graph) | {k: v for k, v in change.counts.items() if v is not MISSING}
    gone = {k for k, v in change.counts.items() if v is MISSING}
    fx_private.set_base_counts(graph, {k: v for k, v in counts.items() if k not in gone})
    if change.codegen is not MISSING:
        fx_private.set_codegen(graph, change.codegen)
    fx_private.sort_users(graph)
    for name, users in birth.users.items():
        if name in by_name and {user.name for user in by_name[name].users} == set(users):
            by_name[name].users = {by_name[user]: None for user in users}


def _put_meta_back(node: Node, values: dict[str, Any]) -> None:
    for key, value in values.items():
        if value is MISSING:
            node.meta.pop(key, None)
        else:
            node.meta[key] = value


def _put_order_back(by_name: dict[str, Node], change: Change, birth: Birth) -> None:
    """Each node that was erased or moved goes right behind its nearest former predecessor that is still there."""
    whole = len(by_name) == len(birth.nodes) and all(name in by_name for name in birth.nodes)
    order, out_of_place = (birth.nodes, None) if whole else (change.order, {*change.erased, *change.moved})
    previous: Node | None = None
    for name in order:
        node = by_name.get(name)
        if node is None:
            continue
        misplaced = out_of_place is None or name in out_of_place
        if misplaced and previous is not None and previous.next is not node:
            previous.append(node)
        elif misplaced and previous is None and node.prev.op != "root":
            next(iter(node.graph.nodes)).prepend(node)
        previous = node


def put_modules_back(gm: nn.Module, change: Change, tensors: dict[str, torch.Tensor], birth: Birth) -> list[nn.Module]:
    """Undo what a change did to modules, and nothing else; the modules that came back."""
    restored = _put_tables_back(gm, change, tensors, birth)
    for path, values in change.attributes.items():
        _put_attributes_back(gm.get_submodule(path), values)
    for name, trainable in change.trainable.items():
        tensor = find_tensor(gm, name)
        if tensor is not None:
            tensor.requires_grad_(trainable)
    return restored


def _put_tables_back(gm: nn.Module, change: Change, tensors: dict[str, torch.Tensor], birth: Birth) -> list[nn.Module]:
    restored = []
    leaving = []  # a module that only moved must not die between its two places
    for (path, name), entry in sorted(change.tables.items(), key=lambda item: item[0][0].count(".")):
        live = fx_private.table(gm.get_submodule(path), name)
        carrier = live.pop(fx_private.HISTORY_CHILD, None) if path == "" else None
        leaving += [live.pop(key, None) for key in entry.added]
        back = {key: revive(value, tensors) for key, value in entry.before.items()}
        live.update(back)
        _reorder(live, entry.order, birth.tables.get((path, name), entry.order))
        if carrier is not None:
            live[fx_private.HISTORY_CHILD] = carrier
        restored += [module for module in back.values() if isinstance(module, nn.Module)]
    return restored


def _reorder(live: dict[str, Any], exact: tuple[str, ...], birth: tuple[str, ...]) -> None:
    """The former order where it fits; otherwise the order of birth, newcomers last."""
    keys = (
        exact if set(exact) == set(live) else [*(k for k in birth if k in live), *(k for k in live if k not in birth)]
    )
    entries = {key: live[key] for key in keys}
    live.clear()
    live.update(entries)


def _put_attributes_back(module: nn.Module, values: dict[str, Any]) -> None:
    for key, value in values.items():
        if value is MISSING:
            fx_private.drop_plain_attribute(module, key)
        elif key == "__class__":
            module.__class__ = value
        elif isinstance(value, Contents):
            value.put_into(module.__dict__, key)
        else:
            fx_private.set_plain_attribute(module, key, copy.copy(value) if isinstance(value, set) else value)


def find_tensor(gm: nn.Module, name: str) -> torch.Tensor | None:
    """The parameter or buffer of a full name."""
    path, _, key = name.rpartition(".")
    try:
        module = gm.get_submodule(path)
    except AttributeError:
        return None
    found = fx_private.table(module, "_parameters").get(key)
    return found if found is not None else fx_private.table(module, "_buffers").get(key)
