"""RemoveNoOps: calls that give back their input are taken out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from refold.examples import layers
from refold.graph.aliasing import changes_shape_in_place, leaves_graph, memory_roots, written_memory
from refold.graph.layout import layout_reader, same_layout
from refold.graph.values import example_value
from refold.graph.view import GraphView
from refold.patterns.no_ops import NoOp, match_no_op, source_of
from refold.rewrite.editor import Editor
from refold.rewrite.refusal import Refuse, attempt
from refold.rewrite.rule import Example, ReversibleRewrite, Site, Skip


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
        return [layers.dropouts(), layers.idle_layers()]

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        taken: set[Node] = set()
        for node in view.nodes:
            found = attempt(match_no_op, view, node)
            if isinstance(found, Refuse):
                yield Skip(node, found.reason)
                continue
            if found is None:
                continue
            roots = memory_roots(view.gm, *_path(node, found)) if found.copies or found.back > 1 else set()
            if not taken.isdisjoint(roots):
                continue  # what it builds on goes first; the next round finds it again
            refusal = attempt(_check, view, node, found)
            if isinstance(refusal, Refuse):
                yield Skip(node, refusal.reason)
                continue
            taken |= {node} | (roots if found.copies else set())
            yield Site((node,), f"{node.name}: {found.why}", found.back)

    def rewrite(self, site: Site, edit: Editor) -> None:
        node, back = site.nodes[0], site.detail
        source = source_of(node, back)
        assert source is not None
        edit.replace_uses(node, source)
        inputs = node.all_input_nodes
        edit.graph.erase_node(node)
        if back > 1:
            edit.erase_unused(inputs)


def _path(node: Node, found: NoOp) -> list[Node]:
    """The values that lie between a call and what it gives back, that included."""
    path = [source_of(node, back) for back in range(1, found.back + 1)]
    return [value for value in path if value is not None]


def _check(view: GraphView, node: Node, found: NoOp) -> None:
    """Refuse a call whose input cannot take its place."""
    source = source_of(node, found.back)
    if source is None:
        raise Refuse("its input is not a node")
    written = view.written_memory if found.copies else set() if found.same else view.analysis(_reshaped)
    if written and written & memory_roots(view.gm, source, node):
        raise Refuse("it is a value of its own, and it or what it was made from is written into")
    if found.copies:
        _check_copy(view, node, source)
    recorded, regions = example_value(node), view.gradient_regions
    carries_gradients = recorded is None or recorded.is_floating_point() or recorded.is_complex()
    if carries_gradients and not found.same and len({regions[n] for n in (node, *_path(node, found))}) > 1:
        raise Refuse("gradients are switched between it and its input, so that it stops them")


def _reshaped(view: GraphView) -> set[Node]:
    """Values whose own shape is changed, so that the same value under another name is not the same any more."""
    return written_memory(view.gm, filter(changes_shape_in_place, view.nodes))


def _check_copy(view: GraphView, node: Node, source: Node) -> None:
    roots = memory_roots(view.gm, source)
    caller_has_it = any(n.op in ("placeholder", "get_attr") for n in roots)
    if leaves_graph(view.gm, {node}) and (caller_has_it or leaves_graph(view.gm, roots, besides=node)):
        raise Refuse("it is a copy that leaves the graph")
    reader = None if same_layout(source, node) else layout_reader(view.gm, node)
    if reader is not None:
        raise Refuse(f"it may lay its values out anew, and {reader.name} may depend on that")
