"""A GraphModule at one moment as plain data: to compare with a later state, and to put the module back to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from operator import attrgetter, ne
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold import fx_private
from refold.record.module_tree import ModuleRecord, ModuleTree
from refold.record.released import ReleasedMemory
from refold.record.sharded_modules import manage_parameters

_TRAINABLE = attrgetter("requires_grad")


@dataclass
class LaterState:
    """A GraphModule at one moment, to be compared with a snapshot taken before."""

    root: nn.Module
    graph: fx_private.GraphState
    modules: dict[str, ModuleRecord]
    """By path: those that are not, or may not be, as they were in the snapshot."""
    base_counts: dict[str, int]
    used_names: set[str]
    written: bool
    """Whether containers of modules, besides their tables, were written into since the snapshot."""

    @cached_property
    def nodes(self) -> dict[str, fx_private.Row]:
        """name -> (node, name, op, target, args, kwargs, type), in graph order."""
        return {row[1]: row for row in self.graph.rows}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers of these modules by their full names, also under a second name."""
        return _named_tensors(self.modules.items())


@dataclass
class Snapshot:
    """A GraphModule at one moment, to be compared and to be put back to."""

    graph: fx_private.WholeGraphState
    tree: ModuleTree
    released: ReleasedMemory
    """Weights whose memory was given up since."""
    versions: list[int | None]
    addresses: list[int | None]
    trainable: list[bool]

    @classmethod
    def of(cls, gm: GraphModule) -> Snapshot:
        """Take a snapshot of a module. Linear in nodes and modules; no tensor is copied."""
        tree = ModuleTree(gm)
        released = ReleasedMemory(tree)  # counts references: before anything else holds a weight
        versions, addresses = fx_private.versions_of(tree.tensors), fx_private.addresses_of(tree.tensors)
        trainable = list(map(_TRAINABLE, tree.tensors))
        return cls(fx_private.graph_state(gm), tree, released, versions, addresses, trainable)

    def later_state(self, gm: GraphModule) -> LaterState:
        """A module as it is now, or what was made of it. What is as it was takes its data from this snapshot, so that
        comparing the two costs little."""
        tree, written = self.tree, self.tree.written()
        if gm is tree.root:
            modules = tree.changed_modules(written)
        else:
            modules = {path: ModuleRecord.of(module) for path, module in fx_private.walk_modules(gm)}
        graph = fx_private.later_graph_state(gm, self.graph)
        counts, names = fx_private.base_counts(gm.graph), fx_private.used_names(gm.graph)
        return LaterState(gm, graph, modules, counts, names, tree.beside_tables(written))

    def restore(self, gm: GraphModule) -> None:
        """Put a module back to this snapshot, object for object, whatever state it is in. Can be called again."""
        self.tree.restore()
        fx_private.restore_graph(gm, self.graph)
        for tensor, address in zip(self.tree.tensors, self.addresses, strict=True):
            if fx_private.address_of(tensor) != address:  # it was made a view of a merged one
                tensor.data = tensor.data.clone()
        for tensor, trainable in zip(self.tree.tensors, self.trainable, strict=True):
            if tensor.requires_grad != trainable:
                tensor.requires_grad_(trainable)
        manage_parameters(gm)

    @cached_property
    def nodes(self) -> dict[str, fx_private.Row]:
        """name -> (node, name, op, target, args, kwargs, type), in graph order."""
        return {row[1]: row for row in self.graph.rows}

    def unsorted_users(self) -> dict[str, tuple[str, ...]]:
        """The users of nodes that have theirs in another order than the graph's."""
        rows, order = self.graph.rows, fx_private.graph_order([row[0] for row in self.graph.rows])
        several = [(row[1], users) for row, users in zip(rows, self.graph.users, strict=True) if len(users) > 1]
        found = {}
        for name, users in several:
            places = [*map(order.__getitem__, users)]
            if places != sorted(places):
                found[name] = tuple(rows[i][1] for i in places)
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every parameter and buffer by its full name, also under a second name."""
        return _named_tensors((path, self.tree.record(i)) for i, path in enumerate(self.tree.paths))

    def written_in_place(self, gm: GraphModule) -> list[torch.Tensor]:
        """Tensors of this snapshot that were written to since, or whose data was replaced while they stayed in the
        module. (One that left it may have become a view of what took its place.)"""
        tensors = self.tree.tensors
        written = _where_differ(tensors, self.versions, fx_private.versions_of(tensors))
        moved = _where_differ(tensors, self.addresses, fx_private.addresses_of(tensors))
        if not moved:
            return written
        stayed = set(map(id, ModuleTree(gm).tensors))
        return written + [t for t in moved if id(t) in stayed and not self.released.has_released(t)]

    def changed_trainable(self) -> dict[str, bool]:
        """By name: whether those tensors were trainable that are no longer what they were."""
        tensors = self.tree.tensors
        changed = set(map(id, _where_differ(tensors, self.trainable, list(map(_TRAINABLE, tensors)))))
        return {n: not t.requires_grad for n, t in self.tensors().items() if id(t) in changed} if changed else {}


def _where_differ(tensors: list[torch.Tensor], before: list[Any], now: list[Any]) -> list[torch.Tensor]:
    """The tensors of which something is not what it was."""
    return [] if before == now else list(compress(tensors, map(ne, before, now)))


def _named_tensors(modules: Iterable[tuple[str, ModuleRecord]]) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {}
    for path, record in modules:
        named |= record.named_tensors(path)
    return named
