"""The graph as the last recorded change left it, to notice edits made outside, and to see through pickling.

Pickling a GraphModule stores code and traces it anew: nodes get other names, `get_attr` moves to the first use, `+=`
becomes `+`, calls on constants become buffers. What is only that is put right; everything else is an edit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from refold import fx_private
from refold.errors import GraphEdited
from refold.record.nodes import NodeRecord, Ref, add_nodes, record_node, record_row, same_value

_NOT_BUILT = (AttributeError, LookupError, NameError, RuntimeError, SyntaxError, TypeError, ValueError)
"""What building a graph from records, or tracing it, raises when names or modules in it are gone."""


class ExpectedGraph:
    """The nodes that should be there: live handles while they last, plain data in a copy or a pickle."""

    def __init__(self, graph: Graph, rows: list[fx_private.Row] | None = None) -> None:
        """`rows` are the graph's, if they are known already."""
        self._rows: list[fx_private.Row] | None = fx_private.rows_of(graph.nodes) if rows is None else rows
        self._records: tuple[NodeRecord, ...] = ()
        self.was_pickled = False

    def records(self) -> tuple[NodeRecord, ...]:
        """The expected nodes as plain data."""
        if self._rows is None:
            return self._records
        return tuple(record_row(row) for row in self._rows)

    def __getstate__(self) -> dict[str, Any]:
        return {"_rows": None, "_records": self.records(), "was_pickled": True}

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpectedGraph:
        copy = ExpectedGraph.__new__(ExpectedGraph)
        copy.__dict__.update(_rows=None, _records=self.records(), was_pickled=self.was_pickled)
        return copy

    def check(self, gm: GraphModule) -> None:
        """Pass if the graph is the expected one; put right what pickling did to it; else raise GraphEdited."""
        nodes = list(gm.graph.nodes)
        if self._rows is not None and len(nodes) == len(self._rows) and all(map(_untouched, nodes, self._rows)):
            return
        expected, found = self.records(), [record_node(node) for node in nodes]
        if _alike(expected, found):
            pass
        elif _alike(by_position(expected), by_position(found)):
            fx_private.rename_nodes(gm.graph, [record.name for record in expected])
            gm.recompile()
        elif self.was_pickled and _is_retrace(gm, expected, found):
            _install(gm, expected)
        else:
            raise GraphEdited(
                f"the graph was edited outside Refold since the last change: expected "
                f"{first_difference(expected, found)}. Take it back, or call refold.commit(gm) to keep the graph "
                f"as it is and give the undo records up."
            )


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
