"""EliminateCommonSubexpressions: what is computed twice from the same values is computed once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from refold.aliasing import memory_roots, switches_mode, written_memory
from refold.edit import Editor
from refold.match import GraphView
from refold.purity import is_pure
from refold.rewrite import Example, ReversibleRewrite, Site, Skip
from refold.slicing import aliases


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
        from refold import examples

        return [examples.twice_the_same(), examples.calls_twice()]

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        leaders: dict[tuple[Any, ...], Node] = {}
        leader_of: dict[Node, Node] = {}
        again: dict[Node, list[Node]] = {}
        written = written_memory(view.gm, view.nodes)
        leaving: set[Node] = set()
        mode = 0
        for node in view.nodes:
            mode += switches_mode(node)
            key = _key(view.gm, node, leader_of, mode) if is_pure(view.gm, node) else None
            leader = leaders.setdefault(key, node) if key is not None else node
            if leader is node:
                continue
            reason = _why_not(view, leader, node, written, leaving)
            if reason is not None:
                yield Skip(node, reason)
                continue
            leader_of[node] = leader
            leaving |= {leader} if _leaves(view.gm, node) else set()
            if node.op != "get_attr":  # a second fetch costs nothing; what is computed from it counts
                again.setdefault(leader, []).append(node)
        for leader, nodes in again.items():
            names = ", ".join(node.name for node in nodes)
            yield Site((leader, *nodes), f"{names}: {leader.name} again", (leader, nodes))

    def rewrite(self, site: Site, edit: Editor) -> None:
        leader, nodes = site.detail
        for node in nodes:
            edit.replace_uses(node, leader)
            edit.erase(node)
        self.mark_as_transformed(leader)


def _why_not(view: GraphView, leader: Node, node: Node, written: set[Node], leaving: set[Node]) -> str | None:
    """`leaving` are those that leave the graph by a call that was joined with them."""
    if written and any(memory_roots(view.gm, n) & written for n in (leader, node, *node.all_input_nodes)):
        return f"it is {leader.name} again, but it, or what it is made from, is written into"
    if node.op != "get_attr" and _leaves(view.gm, node) and (leader in leaving or _leaves(view.gm, leader)):
        return f"it is {leader.name} again, but both leave the graph, where somebody may write into one of them"
    return None


def _leaves(gm: GraphModule, node: Node) -> bool:
    return any(reader.op == "output" for _, reader in aliases(gm, node))


def _key(gm: GraphModule, node: Node, leader_of: dict[Node, Node], mode: int) -> tuple[Any, ...] | None:
    """What a call computes, as something that can be compared; None where it cannot."""
    try:
        target: Any = node.target
        if node.op == "call_module":
            target = id(gm.get_submodule(str(node.target)))
        arguments = _frozen((node.args, dict(node.kwargs)), leader_of)
        key = (node.op, target, arguments, mode)
        hash(key)
    except (TypeError, _NotComparable):
        return None
    return key


class _NotComparable(Exception):
    """An argument whose equality is not understood."""


def _frozen(value: Any, leader_of: dict[Node, Node]) -> Any:
    """An argument with its type, so that only what is equal in kind compares equal."""
    if isinstance(value, Node):
        return leader_of.get(value, value)
    if isinstance(value, tuple | list):
        return (type(value).__name__, *(_frozen(v, leader_of) for v in value))
    if isinstance(value, dict):
        return ("dict", *((k, _frozen(v, leader_of)) for k, v in sorted(value.items())))
    if isinstance(value, slice):
        return ("slice", *(_frozen(v, leader_of) for v in (value.start, value.stop, value.step)))
    if isinstance(value, float):
        return ("float", repr(value))
    plain = (bool, int, str, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout, torch.memory_format)
    if isinstance(value, plain):
        return (type(value).__name__, value)
    raise _NotComparable
