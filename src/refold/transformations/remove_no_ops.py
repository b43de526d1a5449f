"""RemoveNoOps: calls that give back their input are taken out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from refold.aliasing import memory_roots, written_by
from refold.edit import Editor
from refold.layout import layout_reader, same_layout
from refold.match import GraphView
from refold.no_ops import NoOp, match_no_op, source_of
from refold.purity import erase_dead
from refold.rewrite import Example, ReversibleRewrite, Site, Skip
from refold.slicing import aliases


@dataclass(frozen=True, kw_only=True, repr=False)
class RemoveNoOps(ReversibleRewrite):
    """Take out what computes nothing, bit for bit.

    `dropout(x) = x` outside training, `identity(x) = x`, `contiguous(x) = x` where x is contiguous, `x.to(d) = x` where
    x has dtype d, `view(x, s) = x` where x has shape s, `x[:] = x`, `xᵀᵀ = x`, `view(view(x, s), shape of x) = x`,
    `x·1 = x/1 = x − 0 = x`, `−(−x) = x`, `pad(x, 0) = x`, copies that nobody writes into.

    `x + 0` is one for integers only: −0.0 + 0 is 0.0. `detach` is none, since gradients stop there. A dropout that was
    taken out stays out if the module is put into training mode later; reverse this first.
    """

    kind: ClassVar[str] = "graph"

    @classmethod
    def examples(cls) -> Iterable[Example]:
        from refold import examples

        return [examples.dropouts(), examples.idle_layers()]

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        written: set[Node] | None = None
        taken: set[Node] = set()
        for node in view.nodes:
            found = match_no_op(view, node)
            if isinstance(found, str):
                yield Skip(node, found)
            if not isinstance(found, NoOp):
                continue
            if _passes_through(node, found, taken):
                continue  # what it builds on goes first; the next round sees it again
            if found.copies and written is None:
                written = _written_memory(view)
            reason = _why_not(view, node, found, written or set())
            if reason is not None:
                yield Skip(node, reason)
                continue
            taken.add(node)
            yield Site((node,), f"{node.name}: {found.why}", (node, found.back))

    def rewrite(self, site: Site, edit: Editor) -> None:
        node, back = site.detail
        source = source_of(node, back)
        assert source is not None
        edit.replace_uses(node, source)
        inner = node.args[0]
        edit.graph.erase_node(node)
        if back > 1:
            erase_dead(edit, [inner])


def _passes_through(node: Node, found: NoOp, taken: set[Node]) -> bool:
    return found.back > 1 and any(source_of(node, i) in taken for i in range(1, found.back + 1))


def _written_memory(view: GraphView) -> set[Node]:
    """Every value in whose memory somebody writes."""
    targets = [target for place in view.writers for target in written_by(view.gm, view.nodes[place])]
    return memory_roots(view.gm, *targets)


def _why_not(view: GraphView, node: Node, found: NoOp, written: set[Node]) -> str | None:
    source = source_of(node, found.back)
    if source is None:
        return "its input is not a node"
    if not found.copies:
        return None
    roots = memory_roots(view.gm, source)
    if node in written or roots & written:
        return "it is a copy, and the copy or what it was made from is written into"
    leaves = any(reader.op == "output" for _, reader in aliases(view.gm, node))
    if leaves and (len(source.users) > 1 or any(n.op in ("placeholder", "get_attr") for n in roots)):
        return "it is a copy that leaves the graph"
    if same_layout(source, node):
        return None
    reader = layout_reader(view.gm, node)
    return None if reader is None else f"it may lay its values out anew, and {reader.name} may depend on that"
