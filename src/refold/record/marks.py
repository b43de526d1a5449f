"""Marks on nodes: which transformations made or changed a node, by their signatures."""

from __future__ import annotations

from torch.fx import Graph, Node

MARK = "refold_transformed_by"
"""The entry of `node.meta`; a negative signature says that a mark was taken off."""


def marks_of(node: Node) -> tuple[int, ...]:
    """The signatures on a node, also those that were taken off, negated."""
    marks: tuple[int, ...] = node.meta.get(MARK, ())
    return marks


def set_marks(node: Node, marks: tuple[int, ...]) -> None:
    """Put these signatures on a node, and no others."""
    node.meta[MARK] = marks
    _show(node)


def show_marks(graph: Graph) -> None:
    """Let every marked node have the set `transformations`, which code for `optimum.fx` reads. Copies and pickles of a
    graph have it after the next call on them: torch keeps no attributes of nodes."""
    for node in graph.nodes:
        _show(node)


def _show(node: Node) -> None:
    marks = {mark for mark in marks_of(node) if mark >= 0}
    if marks:
        vars(node)["transformations"] = marks
    elif "transformations" in vars(node):
        del vars(node)["transformations"]
