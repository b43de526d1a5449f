"""ChannelsLast: images are kept with their channels innermost in memory while they pass through convolutions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from refold.aliasing import makes_fresh, memory_roots, writes_to, written_by
from refold.edit import Editor, twin_of
from refold.layout import VIEWS, hands_out, is_foreign, make_reshape, makes_contiguous, tells_layout
from refold.match import Call, GraphView, match_conv, match_conv_transpose, rank_of
from refold.purity import name_of
from refold.rewrite import Example, ReversibleRewrite, Site, Skip
from refold.slicing import aliases
from refold.weight_operations import Relayout

aten = torch.ops.aten


@dataclass(frozen=True)
class _Entry:
    """An image that comes in, before which node it is laid out, and who reads it so."""

    image: Node
    before: Node
    readers: list[Node]


@dataclass(frozen=True)
class _Plan:
    """What is to be done to a graph: all of it, or nothing."""

    weights: list[Call]
    entries: list[_Entry]
    views: list[Node]
    exits: list[tuple[Node, Node, int]]


@dataclass(frozen=True, kw_only=True, repr=False)
class ChannelsLast(ReversibleRewrite):
    """Lay out the weights of 2-D convolutions, and the images that enter them, with channels innermost.

    No number changes, only the order in memory: `x.contiguous(memory_format=torch.channels_last)` once where images
    enter, the same for the weights, and back where they leave the graph. Convolutions and elementwise operators hand
    the layout on. Many convolution kernels are faster on it, others are slower: keep it where it was measured to help.
    Views become reshapes, unless a write shows that they share memory. Strides come back exactly.
    """

    @classmethod
    def examples(cls) -> Iterable[Example]:
        from refold import examples

        return [examples.images(), examples.exported_images()]

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        convs: dict[Node, Call] = {}
        for node in view.nodes:
            call = match_conv(view, node, 2) or match_conv_transpose(view, node, 2)
            if isinstance(call, str):
                yield Skip(node, call)
            elif call is not None and rank_of(call.input) not in (None, 4):
                yield Skip(node, "its input has no batch dimension")
            elif call is not None:
                convs[node] = call
        if not convs:
            return
        entries = _entries(view, convs)
        behind = _behind(view, convs, entries)
        refused = next(_refusals(view, behind), None)
        if refused is not None:
            yield refused
            return
        yield from self._site(view, convs, entries, behind)

    def _site(
        self, view: GraphView, convs: dict[Node, Call], entries: list[_Entry], behind: set[Node]
    ) -> Iterator[Site | Skip]:
        weights: list[Call] = []
        for node, call in convs.items():
            if call.weight.is_contiguous(memory_format=torch.channels_last):
                continue
            reason = view.why_shared(call)
            if reason is not None:
                yield Skip(node, reason)
            else:
                weights.append(call)
        if not weights:
            return
        views = [n for n in view.nodes if n.target in VIEWS and not behind.isdisjoint(n.all_input_nodes)]
        plan = _Plan(weights, entries, views, list(_exits(view, behind)))
        yield Site(tuple(call.node for call in weights), f"channels last for {len(weights)} convolutions", plan)

    def rewrite(self, site: Site, edit: Editor) -> None:
        plan: _Plan = site.detail
        for call in plan.weights:
            self._lay_out(edit, call)
        for entry in plan.entries:
            laid_out = self._channels_last(edit, entry.before, entry.image)
            for reader in entry.readers:
                reader.replace_input_with(entry.image, laid_out)
        for node in plan.views:
            make_reshape(node)
            self.mark_as_transformed(node)
        for value, reader, era in plan.exits:
            if (value, era) not in edit.shared:
                edit.shared[value, era] = self._call(edit, reader, "contiguous", value)
            reader.replace_input_with(value, edit.shared[value, era])

    def _lay_out(self, edit: Editor, call: Call) -> None:
        name = call.operands["weight"].name
        operation = Relayout(tuple(call.weight.stride()))
        new = edit.map_weights(operation, {"weight": name}, {"weight": name})["weight"]
        laid_out = new.clone(memory_format=torch.channels_last)
        weight = nn.Parameter(laid_out, requires_grad=call.weight.requires_grad)
        if call.path is not None:
            edit.put_module(call.path, twin_of(edit.gm.get_submodule(call.path), weight=weight))
        else:
            edit.put_tensor(name, weight)
        self.mark_as_transformed(call.node)

    def _channels_last(self, edit: Editor, before: Node, image: Node) -> Node:
        if rank_of(image) is not None:
            return self._call(edit, before, "contiguous", image, memory_format=torch.channels_last)
        inner = self._call(edit, before, "movedim", image, -3, -1)  # an image without a batch is right here too
        return self._call(edit, before, "movedim", self._call(edit, before, "contiguous", inner), -1, -3)

    def _call(self, edit: Editor, before: Node, name: str, value: Node, *args: Any, **settings: Any) -> Node:
        exported = isinstance(before.target, torch._ops.OpOverload) and name == "contiguous"
        made = edit.call(before, aten.contiguous.default if exported else f".{name}", value, *args, **settings)
        made.meta = {k: v for k, v in value.meta.items() if k in ("val", "tensor_meta")}
        self.mark_as_transformed(made)
        return made


# --- where the other layout begins and how far it reaches --------------------------------------------------------


def _entries(view: GraphView, convs: dict[Node, Call]) -> list[_Entry]:
    """The images that come in from elsewhere; what is made of one of them by its readers has the layout already."""
    inside = _behind(view, convs, [])
    images = dict.fromkeys(c.input for c in convs.values() if c.input not in inside and not _is_laid_out(c.input))
    entries = [entry for image in images for entry in _entries_of(view, image, convs)]
    inside = _behind(view, convs, entries)
    return [entry for entry in entries if entry.image not in inside]


def _entries_of(view: GraphView, image: Node, convs: dict[Node, Call]) -> Iterator[_Entry]:
    """One for all readers that make something new of the image; where somebody writes into it, one for each
    convolution, just before it."""
    later = [view.nodes[i] for i in view.writers if i > view.position[image]]
    if writes_to(view.gm, image, later) is not None:
        yield from (_Entry(image, node, [node]) for node, call in convs.items() if call.input is image)
        return
    place = image.next
    while place.op == "placeholder":
        place = place.next
    yield _Entry(image, place, [reader for reader in image.users if reader in convs or _may_read_copy(view, reader)])


def _may_read_copy(view: GraphView, node: Node) -> bool:
    known = makes_fresh(view.gm, node) and not is_foreign(view.gm, node)
    return known and not tells_layout(node) and not view.numbers(node)


def _is_laid_out(node: Node) -> bool:
    return name_of(node) == "contiguous" and node.kwargs.get("memory_format") is torch.channels_last


def _behind(view: GraphView, convs: dict[Node, Call], entries: list[_Entry]) -> set[Node]:
    """Every value that may lie in memory otherwise than before."""
    first = {reader for entry in entries for reader in entry.readers}
    found: set[Node] = set(convs)
    for node in view.nodes:
        if (node in first or not found.isdisjoint(node.all_input_nodes)) and _hands_layout_on(view, node):
            found.add(node)
    return found


def _hands_layout_on(view: GraphView, node: Node) -> bool:
    computes = node.op in ("call_module", "call_function", "call_method") and not is_foreign(view.gm, node)
    return computes and not view.numbers(node) and not makes_contiguous(view.gm, node)


# --- refusals ----------------------------------------------------------------------------------------------------


def _refusals(view: GraphView, behind: set[Node]) -> Iterator[Skip]:
    for node in view.nodes:
        if behind.isdisjoint(node.all_input_nodes):
            continue
        if tells_layout(node):
            yield Skip(node, "it depends on the memory layout of an image")
        foreign = is_foreign(view.gm, node)
        if (
            foreign
            and not hands_out(node)
            and not all(_is_tensor(view, v) for v in node.all_input_nodes if v in behind)
        ):
            yield Skip(node, "it is not torch's, and may read what nobody knows to be an image or not")
        writer = _splitting_write(view, behind, node) if foreign or _copies_by_layout(view, node) else None
        if writer is not None:
            yield Skip(
                node, f"it may share memory with its input or not, by its layout, and {writer.name} writes into it"
            )


_COPY_BY_LAYOUT = {"view", "_unsafe_view", "reshape", "reshape_as", "flatten", "ravel", "contiguous", "to"}


def _copies_by_layout(view: GraphView, node: Node) -> bool:
    """Whether a call gives a view or a copy, depending on how its input lies."""
    if node.op == "call_module":
        return isinstance(view.module(str(node.target)), nn.Flatten)
    return name_of(node) in _COPY_BY_LAYOUT


def _splitting_write(view: GraphView, behind: set[Node], node: Node) -> Node | None:
    """A write that is seen in memory which a value and its source share in one layout and not in the other: through
    the value and read in the source later, or the other way round. Code that is not torch's reads a copy and may write
    into it, or hand it on."""
    start = view.position[node]
    writers = [view.nodes[i] for i in view.writers if i >= start]
    if not writers:
        return None
    mine = {node, *(value for value, _ in aliases(view.gm, node))}
    roots = memory_roots(view.gm, *(v for v in node.all_input_nodes if v in behind))
    source = roots.union(value for root in roots for value, _ in aliases(view.gm, root)) - mine
    for writer in writers:
        written = set(written_by(view.gm, writer))
        through_value = writer is node or not written.isdisjoint(mine)
        through_source = writer is not node and not written.isdisjoint(source)
        watched = (source if through_value else set()) | (mine if through_source else set())
        if any(_is_read_after(view, value, writer) for value in watched):
            return writer
    return None


def _is_read_after(view: GraphView, value: Node, writer: Node) -> bool:
    place = view.position[writer]
    return value.op in ("placeholder", "get_attr") or any(view.position[user] > place for user in value.users)


# --- where the other layout ends ---------------------------------------------------------------------------------


def _exits(view: GraphView, behind: set[Node]) -> Iterator[tuple[Node, Node, int]]:
    """(value, reader, era) where an image leaves the graph or meets code that nobody knows; readers share a copy until
    something is written."""
    for node in view.nodes:
        if node.op != "output" and not is_foreign(view.gm, node):
            continue
        era = bisect_left(view.writers, view.position[node])
        yield from ((v, node, era) for v in node.all_input_nodes if v in behind and _is_tensor(view, v))


_GIVE_SEVERAL = (nn.RNNBase, nn.LSTMCell, nn.MultiheadAttention)


def _is_tensor(view: GraphView, node: Node) -> bool:
    """Whether a value is one tensor of two dimensions at least: by what was noted, or as a module of torch makes it."""
    rank = rank_of(node)
    if rank is not None or node.op != "call_module":
        return rank is not None and rank > 1
    module = view.module(str(node.target))
    return not isinstance(module, _GIVE_SEVERAL) and not getattr(module, "return_indices", False)
