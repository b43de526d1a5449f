"""RemoveNoOps: calls that give back their input are taken out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from refold.aliasing import changes_shape_in_place, gradient_eras, makes_fresh, memory_roots, written_memory
from refold.edit import Editor
from refold.layout import layout_reader, same_layout
from refold.match import GraphView, example_value
from refold.no_ops import NoOp, match_no_op, source_of
from refold.purity import erase_dead
from refold.rewrite import Example, ReversibleRewrite, Site, Skip


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
        written = written_memory(view.gm, view.nodes)
        reshaped = written_memory(view.gm, (node for node in view.nodes if changes_shape_in_place(node)))
        taken: set[Node] = set()
        era = gradient_eras(view.nodes)
        for node in view.nodes:
            found = match_no_op(view, node)
            if isinstance(found, str):
                yield Skip(node, found)
            if not isinstance(found, NoOp):
                continue
            roots = memory_roots(view.gm, *_path(node, found)) if found.copies or found.back > 1 else set()
            if roots & taken:
                continue  # what it builds on goes first; the next round sees it again
            reason = _why_not(view, node, found, written if found.copies else set() if found.same else reshaped)
            if reason is None and _cuts_gradients(node, found, era):
                reason = "gradients are switched between it and its input, so that it stops them"
            if reason is not None:
                yield Skip(node, reason)
                continue
            taken |= {node} | (roots if found.copies else set())
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


def _path(node: Node, found: NoOp) -> list[Node]:
    """The values that lie between a call and what it gives back, that included."""
    path = [source_of(node, back) for back in range(1, found.back + 1)]
    return [value for value in path if value is not None]


def _cuts_gradients(node: Node, found: NoOp, era: dict[Node, int]) -> bool:
    """Whether a new value is made where gradients are switched off; a call that hands on its very input makes none."""
    noted = example_value(node)
    carries = noted is None or noted.is_floating_point() or noted.is_complex()
    return carries and not found.same and len({era[n] for n in (node, *_path(node, found))}) > 1


def _why_not(view: GraphView, node: Node, found: NoOp, written: set[Node]) -> str | None:
    """`written` is where a write would be seen in another value than before."""
    source = source_of(node, found.back)
    if source is None:
        return "its input is not a node"
    if written and written & memory_roots(view.gm, source, node):
        return "it is a value of its own, and it or what it was made from is written into"
    if not found.copies:
        return None
    roots = memory_roots(view.gm, source)
    caller_has_it = any(n.op in ("placeholder", "get_attr") for n in roots)
    if _leaves(view.gm, {node}) and (caller_has_it or _leaves(view.gm, roots, besides=node)):
        return "it is a copy that leaves the graph"
    if same_layout(source, node):
        return None
    reader = layout_reader(view.gm, node)
    return None if reader is None else f"it may lay its values out anew, and {reader.name} may depend on that"


def _leaves(gm: GraphModule, values: set[Node], besides: Node | None = None) -> bool:
    """Whether the memory of some values leaves the graph, other than through one node."""
    pending, seen = list(values - {besides}), values | {besides}
    while pending:
        for reader in pending.pop().users:
            if reader.op == "output":
                return True
            if reader not in seen and not makes_fresh(gm, reader):
                seen.add(reader)
                pending.append(reader)
    return False
