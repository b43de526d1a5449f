"""ChannelsLast: images are kept with their channels innermost in memory while they pass through convolutions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from refold.edit import Editor, twin_of
from refold.layout import VIEWS, hands_out, is_foreign
from refold.match import Call, GraphView, match_conv, match_conv_transpose, rank_of
from refold.purity import name_of
from refold.rewrite import Example, ReversibleRewrite, Site, Skip
from refold.weight_operations import Relayout

aten = torch.ops.aten

_NEED_LAYOUT = {"as_strided", "view_as", "stride", "data_ptr", "storage_offset", "is_contiguous", "view_as_complex"}


@dataclass(frozen=True)
class _Plan:
    """What is to be done to a graph: all of it, or nothing."""

    weights: list[Call]
    entries: list[Node]
    views: list[Node]
    exits: list[tuple[Node, Node]]


@dataclass(frozen=True, kw_only=True, repr=False)
class ChannelsLast(ReversibleRewrite):
    """Lay out the weights of 2-D convolutions, and the images that enter them, with channels innermost.

    No number changes, only the order in memory: `x.contiguous(memory_format=torch.channels_last)` once where images
    enter, the same for the weights, and back where they leave the graph. Convolutions and elementwise operators hand
    the layout on. Many convolution kernels are faster on it, others are slower: keep it where it was measured to help.
    Views become reshapes. Strides come back exactly.
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
            elif call is not None:
                convs[node] = call
        if not convs:
            return
        behind = _behind(view, convs)
        strange = next((n for n in behind if name_of(n) in _NEED_LAYOUT), None)
        if strange is not None:
            yield Skip(strange, "it depends on the memory layout of an image")
            return
        unsure = next(_unsure_readers(view, behind), None)
        if unsure is not None:
            yield Skip(unsure, "it is not torch's, and may read what nobody knows to be an image or not")
            return
        yield from self._site(view, convs, behind)

    def _site(self, view: GraphView, convs: dict[Node, Call], behind: set[Node]) -> Iterator[Site | Skip]:
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
        entries = [c.input for c in convs.values() if c.input not in behind and not _is_laid_out(c.input)]
        views = [n for n in behind if n.target in VIEWS]
        plan = _Plan(weights, list(dict.fromkeys(entries)), views, list(_exits(view, behind)))
        yield Site(tuple(call.node for call in weights), f"channels last for {len(weights)} convolutions", plan)

    def rewrite(self, site: Site, edit: Editor) -> None:
        plan: _Plan = site.detail
        for call in plan.weights:
            self._lay_out(edit, call)
        for node in plan.entries:
            self._enter(edit, node)
        for node in plan.views:
            node.target = VIEWS[node.target]
            self.mark_as_transformed(node)
        for value, reader in plan.exits:
            reader.replace_input_with(value, self._contiguous(edit, value, reader))

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

    def _enter(self, edit: Editor, node: Node) -> None:
        readers = [user for user in node.users if _reads_image(user)]
        place = node.next
        while place.op == "placeholder":
            place = place.next
        entry = self._call(edit, place, node, memory_format=torch.channels_last)
        for reader in readers:
            reader.replace_input_with(node, entry)

    def _contiguous(self, edit: Editor, value: Node, reader: Node) -> Node:
        if value not in edit.shared:
            edit.shared[value] = self._call(edit, reader, value)
        return edit.shared[value]

    def _call(self, edit: Editor, before: Node, value: Node, **settings: Any) -> Node:
        exported = isinstance(before.target, torch._ops.OpOverload)
        made = edit.call(before, aten.contiguous.default if exported else ".contiguous", value, **settings)
        made.meta = {k: v for k, v in value.meta.items() if k in ("val", "tensor_meta")}
        self.mark_as_transformed(made)
        return made


_READS_SHAPE = {"getattr", "sym_size", "size", "dim"}


def _reads_image(node: Node) -> bool:
    return node.op in ("call_module", "call_function", "call_method") and name_of(node) not in _READS_SHAPE


def _is_laid_out(node: Node) -> bool:
    return name_of(node) == "contiguous" and node.kwargs.get("memory_format") is torch.channels_last


def _behind(view: GraphView, convs: dict[Node, Call]) -> set[Node]:
    """Every value that a convolution has a part in, as far as it may be an image."""
    found: set[Node] = set(convs)
    for node in view.nodes:
        may_be_image = rank_of(node) in (None, 4) or name_of(node) in _ENDS
        computes = node.op != "output" and not is_foreign(view.gm, node)
        if computes and may_be_image and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


_ENDS = {"view", "_unsafe_view", *_NEED_LAYOUT}
"""Calls that turn an image into something else and care for its layout."""


def _exits(view: GraphView, behind: set[Node]) -> Iterator[tuple[Node, Node]]:
    """(value, reader) where an image leaves the graph or meets code that nobody knows."""
    for node in view.nodes:
        if node.op != "output" and not is_foreign(view.gm, node):
            continue
        for value in node.all_input_nodes:
            if value in behind and _is_image(value) and name_of(value) != "contiguous":
                yield value, node


def _unsure_readers(view: GraphView, behind: set[Node]) -> Iterator[Node]:
    """Foreign code that reads something of unknown shape behind a convolution (in graphs without example values)."""
    for node in view.nodes:
        if is_foreign(view.gm, node) and not hands_out(node):
            read = [v for v in node.all_input_nodes if v in behind and name_of(v) not in _READS_SHAPE]
            if any(rank_of(value) is None and not _is_image(value) for value in read):
                yield node


def _is_image(node: Node) -> bool:
    """Whether a value is one image: of four dimensions, or what a module of torch makes from one."""
    rank = rank_of(node)
    return rank == 4 or (rank is None and node.op == "call_module")
