"""The graph as the last recorded change left it, to notice edits made outside, and to see through pickling.

Pickling a GraphModule stores code and traces it anew: nodes get other names, `get_attr` moves to the first use, `+=`
becomes `+`, calls on constants become buffers. What is only that is put right; everything else is an edit. An edit
stands in the way of undoing a change only where it touches what the change did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from refold import fx_private
from refold.record.change import refs_in
from refold.record.difference import moved_names
from refold.record.nodes import NodeRecord, Ref, add_nodes, record_node, record_row, same_value

_NOT_BUILT = (AttributeError, LookupError, NameError, RuntimeError, SyntaxError, TypeError, ValueError)
"""What building a graph from records, or tracing it, raises when names or modules in it are gone."""


@dataclass(frozen=True)
class OutsideEdit:
    """What was done to a graph by hand, behind so many changes."""

    place: int
    what: str
    writes: frozenset[str]
    reads: frozenset[str]
    moved: tuple[str, ...]

    def after_undoing(self, index: int) -> OutsideEdit:
        """The same where one of the changes is gone."""
        return replace(self, place=self.place - 1) if index < self.place else self


class ExpectedGraph:
    """The nodes that should be there: live handles while they last, plain data in a copy or a pickle."""

    def __init__(
        self, graph: Graph, rows: list[fx_private.Row] | None = None, edits: tuple[OutsideEdit, ...] = ()
    ) -> None:
        """`rows` are the graph's, if they are known already; `edits` are those made outside so far."""
        self._rows: list[fx_private.Row] | None = fx_private.rows_of(graph.nodes) if rows is None else rows
        self._records: tuple[NodeRecord, ...] = ()
        self.was_pickled = False
        self.edits = edits

    def records(self) -> tuple[NodeRecord, ...]:
        """The expected nodes as plain data."""
        if self._rows is None:
            return self._records
        return tuple(record_row(row) for row in self._rows)

    def __getstate__(self) -> dict[str, Any]:
        return {"_rows": None, "_records": self.records(), "was_pickled": True, "edits": self.edits}

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpectedGraph:
        copy = ExpectedGraph.__new__(ExpectedGraph)
        copy.__dict__.update(_rows=None, _records=self.records(), was_pickled=self.was_pickled, edits=self.edits)
        return copy

    def is_current(self, gm: GraphModule) -> bool:
        """Whether the graph is the expected one, name for name."""
        nodes = list(gm.graph.nodes)
        if self._rows is not None and len(nodes) == len(self._rows) and all(map(_untouched, nodes, self._rows)):
            return True
        return _alike(self.records(), [record_node(node) for node in nodes])

    def settled(self, gm: GraphModule, place: int) -> ExpectedGraph:
        """What is to be expected from now on: the graph as it is, once what pickling did to it is put right, with all
        the edits that were made outside; a new one was made behind so many changes."""
        if self.is_current(gm):
            return self if self._rows is not None else ExpectedGraph(gm.graph, edits=self.edits)
        expected, found, edits = self.records(), [record_node(node) for node in gm.graph.nodes], self.edits
        if _alike(by_position(expected), by_position(found)):
            fx_private.rename_nodes(gm.graph, [record.name for record in expected])
            gm.recompile()
        elif self.was_pickled and _is_retrace(gm, expected, found):
            _install(gm, expected)
        else:
            edits = (*edits, _edit(place, expected, found, names_hold=not self.was_pickled))
        return ExpectedGraph(gm.graph, edits=edits)


def _edit(place: int, expected: Sequence[NodeRecord], found: Sequence[NodeRecord], names_hold: bool) -> OutsideEdit:
    """What was done to a graph. Where names do not say which node is which, all of it was."""
    old, new = ({record.name: record for record in records} for records in (expected, found))
    stayed = [name for name in old if names_hold and name in new]
    moved = moved_names(stayed, [name for name in new if name in set(stayed)]) if stayed else []
    changed = [name for name in stayed if not _same_node(old[name], new[name])]
    gone_or_new = [record for records in (old, new) for name, record in records.items() if name not in set(stayed)]
    reads = [frozenset(_reads(record)) for record in gone_or_new]
    reads += [frozenset(_reads(old[name]) ^ _reads(new[name])) for name in changed]
    written = frozenset(f"%{name}" for name in (*(record.name for record in gone_or_new), *changed, *moved))
    what = first_difference(expected, found) or ""
    return OutsideEdit(place, what, written, frozenset().union(*reads), tuple(moved))


def _reads(record: NodeRecord) -> set[str]:
    """What a node refers to: nodes, and what it calls or fetches from the module."""
    called = {record.target} if record.op in ("call_module", "get_attr") else set()
    return refs_in(record) | called


def _untouched(node: Node, row: fx_private.Row) -> bool:
    if node is not row[0] or node.name != row[1] or node.op != row[2] or node.target is not row[3]:
        return False
    return same_value(node.args, row[4]) and same_value(node.kwargs, row[5])


def _alike(expected: Sequence[NodeRecord], found: Sequence[NodeRecord]) -> bool:
    return len(expected) == len(found) and all(map(_same_node, expected, found))


def _same_node(a: NodeRecord, b: NodeRecord) -> bool:
    return all(same_value(getattr(a, f), getattr(b, f)) for f in ("name", "op", "target", "args", "kwargs"))


def by_position(records: Sequence[NodeRecord]) -> list[NodeRecord]:
    """The same records with nodes named by their place; a placeholder's target names an argument, not a node."""
    place = {record.name: str(i) for i, record in enumerate(records)}

    def rename(value: Any) -> Any:
        return Ref(place.get(value.name, value.name)) if isinstance(value, Ref) else value

    return [
        NodeRecord(str(i), r.op, r.target, map_aggregate(r.args, rename), map_aggregate(r.kwargs, rename), r.type)
        for i, r in enumerate(records)
    ]


def _build(gm: GraphModule, records: Sequence[NodeRecord]) -> Graph:
    """A graph made from records, with their very names."""
    graph = Graph(owning_module=gm, tracer_cls=fx_private.tracer_class(gm))
    add_nodes(graph, records)
    fx_private.set_codegen(graph, fx_private.codegen(gm.graph))
    return graph


def _is_retrace(gm: GraphModule, expected: Sequence[NodeRecord], found: Sequence[NodeRecord]) -> bool:
    """Whether the graph that is there is what pickling makes of the expected one."""
    try:
        again = fx_private.retrace_as_pickle_does(GraphModule(gm, _build(gm, expected)))
    except _NOT_BUILT:  # the graph is not one that pickling could have made
        return False
    return _alike(by_position([record_node(n) for n in again.graph.nodes]), by_position(found))


def _install(gm: GraphModule, expected: Sequence[NodeRecord]) -> None:
    """Put the expected graph in the place of its retrace, and drop the constants that the retrace made."""
    wanted = {record.target for record in expected if record.op == "get_attr"}
    invented = {n.target for n in gm.graph.nodes if n.op == "get_attr"} - wanted
    gm.graph = _build(gm, expected)
    for name in invented:
        if isinstance(name, str) and name.startswith("_tensor_constant"):
            delattr(gm, name)


def first_difference(expected: Sequence[NodeRecord], found: Sequence[NodeRecord]) -> str | None:
    """Where two lists of nodes part."""
    for a, b in zip(expected, found, strict=False):
        if not _same_node(a, b):
            return f"'{a}' where '{b}' was found"
    return None if len(expected) == len(found) else f"{len(expected)} nodes where {len(found)} were found"
