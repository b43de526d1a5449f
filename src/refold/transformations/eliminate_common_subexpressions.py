"""EliminateCommonSubexpressions: what is computed twice from the same values is computed once."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from refold.examples import layers
from refold.graph.aliasing import leaves_graph, memory_roots
from refold.graph.purity import is_pure
from refold.graph.view import GraphView
from refold.rewrite.editor import Editor
from refold.rewrite.refusal import Refuse, attempt
from refold.rewrite.rule import Example, ReversibleRewrite, Site, Skip


@dataclass(frozen=True, kw_only=True, repr=False)
class EliminateCommonSubexpressions(ReversibleRewrite):
    """Compute equal calls once: `a = f(x); b = f(x)` becomes `a = f(x)`, and what read b reads a.

    Calls are equal if they call the same thing with the same values and settings (1 is not 1.0, 0.0 is not −0.0) in the
    same mode of gradients and autocast. Only what purely computes is joined: nothing random, nothing that writes, no
    module of unknown code, no module in a mode in which it draws numbers or counts. Values that are written into are
    left alone, and so are two results that both leave the graph.
    """

    kind: ClassVar[str] = "graph"

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return [layers.twice_the_same(), layers.calls_twice()]

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        leaders: dict[tuple[Any, ...], Node] = {}
        leader_of: dict[Node, Node] = {}
        again: dict[Node, list[Node]] = {}
        leaving: set[Node] = set()
        for node in view.nodes:
            key = _key(view, node, leader_of) if is_pure(view.gm, node) else None
            leader = leaders.setdefault(key, node) if key is not None else node
            if leader is node:
                continue
            refusal = attempt(_check, view, leader, node, leaving)
            if isinstance(refusal, Refuse):
                yield Skip(node, refusal.reason)
                continue
            leader_of[node] = leader
            leaving |= {leader} if leaves_graph(view.gm, {node}) else set()
            if node.op != "get_attr":  # a second fetch costs nothing; what is computed from it counts
                again.setdefault(leader, []).append(node)
        for leader, nodes in again.items():
            names = ", ".join(node.name for node in nodes)
            yield Site((leader, *nodes), f"{names}: {leader.name} again")

    def rewrite(self, site: Site, edit: Editor) -> None:
        leader, *nodes = site.nodes
        for node in nodes:
            edit.replace_uses(node, leader)
            edit.erase(node)
        edit.mark(leader)


def _check(view: GraphView, leader: Node, node: Node, leaving: set[Node]) -> None:
    """Refuse to join two equal calls; `leaving` are those that leave the graph by a call that was joined with them."""
    written = view.written_memory
    if written and any(memory_roots(view.gm, n) & written for n in (leader, node, *node.all_input_nodes)):
        raise Refuse(f"it is {leader.name} again, but it, or what it is made from, is written into")
    if node.op == "get_attr" or not leaves_graph(view.gm, {node}):
        return
    if leader in leaving or leaves_graph(view.gm, {leader}):
        raise Refuse(f"it is {leader.name} again, but both leave the graph, where somebody may write into one of them")


_COMPARABLE = bool | int | float | str | None | types.EllipsisType | Node
_COMPARABLE |= torch.dtype | torch.device | torch.layout | torch.memory_format
"""Arguments whose text tells them apart, in value and in kind."""


def _key(view: GraphView, node: Node, leader_of: dict[Node, Node]) -> tuple[Any, ...] | None:
    """What a call computes, as something that can be compared; None where it cannot."""
    values: list[Any] = []

    def lead(value: Any) -> Any:
        values.append(value)
        return leader_of.get(value, value) if isinstance(value, Node) else value

    arguments = repr(map_aggregate((node.args, dict(sorted(node.kwargs.items()))), lead))
    target = id(view.module(str(node.target))) if node.op == "call_module" else node.target
    key = (node.op, target, arguments, view.region(node)[1])
    return key if all(isinstance(value, _COMPARABLE) for value in values) else None
