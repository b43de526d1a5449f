"""ChannelsLast: images are kept with their channels innermost in memory while they pass through convolutions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from refold.examples import layers
from refold.fingerprint import is_sharded
from refold.graph import layout
from refold.graph.aliasing import writes_to
from refold.graph.targets import name_of, runs_unknown_code
from refold.graph.values import rank_of
from refold.graph.view import Call, GraphView
from refold.rewrite.editor import Editor
from refold.rewrite.operators import CONVOLUTION, TRANSPOSED_CONVOLUTION
from refold.rewrite.refusal import Refuse, attempt, own
from refold.rewrite.rule import Example, ReversibleRewrite, Site, Skip
from refold.weights.structural import Relayout


@dataclass(frozen=True)
class _Entry:
    """An image that comes in, before which node it is laid out, and which nodes read it so."""

    image: Node
    before: Node
    readers: list[Node]


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
        return [layers.images(), layers.exported_images()]

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        convs: dict[Node, Call] = {}
        for node in view.nodes:
            call = attempt(_convolution, view, node)
            if isinstance(call, Refuse):
                yield Skip(node, call.reason)
            elif call is not None:
                convs[node] = call
        if not convs:
            return
        entries = _entries(view, convs)
        changed = _changed(view, convs, entries)
        for node in view.nodes:
            refusal = attempt(_check_reader, view, changed, node)
            if isinstance(refusal, Refuse):
                yield Skip(node, refusal.reason)
                return
        weights = [c for c in convs.values() if not c.weight.is_contiguous(memory_format=torch.channels_last)]
        refusals = {call.node: attempt(own, view, call) for call in weights}
        yield from (Skip(node, refusal.reason) for node, refusal in refusals.items() if refusal is not None)
        weights = [call for call in weights if refusals[call.node] is None]
        if weights:
            views = [n for n in view.nodes if n.target in layout.VIEWS and not changed.isdisjoint(n.all_input_nodes)]
            detail = weights, entries, views, list(layout.layout_exits(view, changed))
            yield Site(tuple(call.node for call in weights), f"channels last for {len(weights)} convolutions", detail)

    def rewrite(self, site: Site, edit: Editor) -> None:
        weights, entries, views, exits = site.detail
        for call in weights:
            name = call.operands["weight"].name
            operation = Relayout(tuple(call.weight.stride()))
            new = edit.map_weights(operation, {"weight": name}, {"weight": name})["weight"]
            edit.replace_layer(call, weight=new.clone(memory_format=torch.channels_last))
        for entry in entries:
            laid_out = _channels_last(edit, entry.before, entry.image)
            for reader in entry.readers:
                reader.replace_input_with(entry.image, laid_out)
        for node in views:
            layout.make_reshape(node)
            edit.mark(node)
        for value, reader, region in exits:
            if (value, region) not in edit.shared:
                edit.shared[value, region] = _insert(edit, reader, "contiguous", value)
            reader.replace_input_with(value, edit.shared[value, region])


def _convolution(view: GraphView, node: Node) -> Call | None:
    call = CONVOLUTION.match(view, node, 2) or TRANSPOSED_CONVOLUTION.match(view, node, 2)
    if call is not None and rank_of(call.input) not in (None, 4):
        raise Refuse("its input has no batch dimension")
    if call is not None and is_sharded(call.weight):
        raise Refuse("its weight is sharded, and shards lie row by row in memory")
    return call


def _channels_last(edit: Editor, before: Node, image: Node) -> Node:
    if rank_of(image) is not None:
        return _insert(edit, before, "contiguous", image, memory_format=torch.channels_last)
    inner = _insert(edit, before, "movedim", image, -3, -1)  # an image without a batch is right here too
    return _insert(edit, before, "movedim", _insert(edit, before, "contiguous", inner), -1, -3)


def _insert(edit: Editor, before: Node, name: str, value: Node, *args: Any, **settings: Any) -> Node:
    made = edit.insert(before, name, value, *args, **settings)
    edit.mark(made)
    return made


# --- where the other layout begins and how far it reaches --------------------------------------------------------


def _entries(view: GraphView, convs: dict[Node, Call]) -> list[_Entry]:
    """The images that come in from elsewhere; what is made of one of them by its readers has the layout already."""
    inside = _changed(view, convs, [])
    images = dict.fromkeys(call.input for call in convs.values() if call.input not in inside)
    made_so = [n for n in images if name_of(n) == "contiguous" and n.kwargs.get("memory_format") is torch.channels_last]
    entries = [entry for image in images if image not in made_so for entry in _entries_of(view, image, convs)]
    inside = _changed(view, convs, entries)
    return [entry for entry in entries if entry.image not in inside]


def _entries_of(view: GraphView, image: Node, convs: dict[Node, Call]) -> Iterator[_Entry]:
    """One for all readers that make a new value of the image; where it is written into, one just before each
    convolution."""
    later = [view.nodes[i] for i in view.writers if i > view.position[image]]
    if writes_to(view.gm, image, later) is not None:
        yield from (_Entry(image, node, [node]) for node, call in convs.items() if call.input is image)
        return
    before = next(n for n in view.nodes[view.position[image] + 1 :] if n.op != "placeholder")
    readers = [node for node in image.users if node in convs or layout.takes_any_layout(view, node)]
    yield _Entry(image, before, readers)


def _changed(view: GraphView, convs: dict[Node, Call], entries: list[_Entry]) -> set[Node]:
    return layout.changed_layouts(view, convs, {reader for entry in entries for reader in entry.readers})


def _check_reader(view: GraphView, changed: set[Node], node: Node) -> None:
    """Refuse a reader of an image that would notice the other layout."""
    images = [value for value in node.all_input_nodes if value in changed]
    if not images:
        return
    if layout.tells_layout(node):
        raise Refuse("it depends on the memory layout of an image")
    unknown = runs_unknown_code(view.gm, node) and not layout.hands_out(node)
    if unknown and not all(layout.is_one_tensor(view, image) for image in images):
        raise Refuse("it is unknown code, and may read what is not known to be an image")
    writer = layout.splitting_write(view, changed, node)
    if writer is not None:
        raise Refuse(f"it may share memory with its input or not, by its layout, and {writer.name} writes into it")
