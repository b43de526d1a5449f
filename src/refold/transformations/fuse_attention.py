"""FuseAttention: attention that is written out becomes one call, and repeated heads become grouped-query attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from refold.aliasing import writes_to
from refold.attention import Attention, match_attention, size_of, why_not_read_later
from refold.attention_pattern import Written, match_written, unrepeated, why_not_fusible
from refold.edit import Editor
from refold.layout import NEED_LAYOUT, VIEWS, readers_behind
from refold.mask_analysis import Analysis
from refold.mask_bounds import MaskBounds
from refold.match import GraphView, example_value, rank_of
from refold.purity import erase_dead
from refold.rewrite import Example, ReversibleRewrite, Site, Skip
from refold.slicing import make_views_reshapes, make_whole_for_others, why_not_sliceable

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, repr=False)
class FuseAttention(ReversibleRewrite):
    """Call `scaled_dot_product_attention` for attention that is written out in single steps.

    `softmax(c·q·kᵀ + M)·v`  becomes  `scaled_dot_product_attention(q, k, v, attn_mask=M, scale=c)`;
    k and v whose heads were repeated n times (grouped queries) are read unrepeated, with `enable_gqa=True`.

    Casts between scores and weights (a softmax in float32) go, since the fused kernels compute in float32 at least.
    Left alone: weights that something else reads (output_attentions), dropout in training, a scale that is computed,
    operands that are written into before the last product, masks that may block a whole row (softmax gives NaN there,
    fused attention 0; see `refold.mask_bounds`). `grouped=False` leaves repeated heads alone.
    """

    kind: ClassVar[str] = "graph"
    grouped: bool = True

    @classmethod
    def examples(cls) -> Iterable[Example]:
        from refold import examples

        return [examples.written_attention(), examples.biased_attention(), examples.grouped_attention()]

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        found: list[Written] = []
        for node in view.nodes:
            match = match_written(view, node)
            if isinstance(match, str):
                yield Skip(node, match)
            elif match is not None:
                found.append(match)
        found.sort(key=lambda match: view.position[match.last])
        bounds = MaskBounds(view)
        analysis = cache(lambda: Analysis(view, [mask for match in found for mask in match.masks]))
        taken: set[Node] = set()
        for match in found:
            reason = why_not_fusible(view, match, bounds, analysis) or _why_layout(view, match.last)
            if reason is None and not taken.isdisjoint(match.nodes):
                reason = "its steps are part of other attention"
            if reason is not None:
                yield Skip(match.softmax, reason)
                continue
            taken |= set(match.nodes)
            what = f"{match.last.name} is attention and becomes one call"
            yield Site(match.nodes, what, (match, _sum_is_shared(view, match.masks)))
        if self.grouped:
            yield from self._repeated(view)

    def _repeated(self, view: GraphView) -> Iterator[Site | Skip]:
        for node in view.nodes:
            call = match_attention(node)
            if not isinstance(call, Attention) or call.enable_gqa is not False:
                continue
            key, value = unrepeated(call.key), unrepeated(call.value)
            if key is None or value is None:
                continue
            reason = _why_not_grouped(view, call, key, value)
            if reason is not None:
                yield Skip(node, reason)
            else:
                yield Site((node,), f"{node.name}: heads repeated {key[1]} times are read once")

    def rewrite(self, site: Site, edit: Editor) -> None:
        if site.detail is not None:
            found, share_sum = site.detail
            self._fuse(found, share_sum, edit)
            return
        call = match_attention(site.nodes[0])
        assert isinstance(call, Attention)
        (key, _), (value, _) = unrepeated(call.key), unrepeated(call.value)  # type: ignore[misc]
        call.write(key=key, value=value, enable_gqa=True)
        self.mark_as_transformed(call.node)
        erase_dead(edit, {call.key, call.value})

    def _fuse(self, found: Written, share_sum: bool, edit: Editor) -> None:
        exported = isinstance(found.last.target, torch._ops.OpOverload)
        steps = _Steps(edit, found.last, exported)
        query, keys, value = found.operands
        key = found.key if found.key is not None else steps.call("transpose", keys, -2, -1)
        operands: list[Node] = [query, key, value]
        flat = rank_of(query) == 3  # kernels want heads: take the batch for them
        if flat:
            operands = [steps.call("unsqueeze", node, 0) for node in operands]
        mask = steps.sum(found.masks, share_sum)
        if mask is not None and flat and rank_of(mask) == 3:
            mask = steps.call("unsqueeze", mask, 0)
        target = aten.scaled_dot_product_attention.default if exported else F.scaled_dot_product_attention
        given: dict[str, Any] = {"scale": found.scale} | ({} if mask is None else {"attn_mask": mask})
        fused = edit.call(found.last, target, *operands, **given)
        self.mark_as_transformed(fused)
        noted = example_value(found.last)
        assert noted is not None
        fused.meta["val"] = noted.unsqueeze(0) if flat else noted
        result = steps.call("squeeze", fused, 0) if flat else fused
        edit.replace_uses(found.last, result)
        make_views_reshapes(edit.gm, result)
        behind = list(readers_behind(edit.gm, result))  # the kernels lay their result out as they like
        make_whole_for_others(edit.gm, result, behind)
        for reader in behind:
            reader.target = VIEWS.get(reader.target, reader.target)
        for node in reversed(found.nodes):
            inputs = node.all_input_nodes
            edit.graph.erase_node(node)
            erase_dead(edit, [n for n in inputs if n not in found.nodes])


@dataclass(frozen=True)
class _Steps:
    """Inserts the small calls around the fused one, in the manner of the graph."""

    edit: Editor
    before: Node
    exported: bool

    def call(self, name: str, *args: Any) -> Node:
        overloads = {"transpose": aten.transpose.int, "unsqueeze": aten.unsqueeze.default, "squeeze": aten.squeeze.dim}
        node = self.edit.call(self.before, overloads[name] if self.exported else f".{name}", *args)
        value = example_value(args[0])
        if value is not None:
            node.meta["val"] = getattr(value, name)(*args[1:])
        return node

    def sum(self, masks: tuple[Node, ...], share: bool) -> Node | None:
        """All masks as one; layers that add the same ones share the sum."""
        if len(masks) < 2:
            return next(iter(masks), None)
        if share and masks in self.edit.shared:
            return self.edit.shared[masks]
        joint = masks[0]
        for mask in masks[1:]:
            value = example_value(joint) + example_value(mask)  # type: ignore[operator]
            joint = self.edit.call(self.before, aten.add.Tensor if self.exported else torch.add, joint, mask)
            joint.meta["val"] = value
        self.edit.shared[masks] = joint
        return joint


def _sum_is_shared(view: GraphView, masks: tuple[Node, ...]) -> bool:
    """Whether masks are the same for all layers that add them: nothing writes into them once they are there."""
    return not any(writes_to(view.gm, mask, view.writers_between(mask, view.nodes[-1])) for mask in masks)


def _why_layout(view: GraphView, node: Node) -> str | None:
    """Why a value must lie in memory as it does, as a sentence."""
    for reader in readers_behind(view.gm, node):
        given = (*reader.args, *reader.kwargs.values())
        casts = reader.target in VIEWS and any(isinstance(a, torch.dtype) for a in given)
        if casts or reader.target in NEED_LAYOUT:
            return f"{reader.name} depends on the memory layout of its output"
    return why_not_sliceable(view, node)


def _why_not_grouped(view: GraphView, call: Attention, key: tuple[Node, int], value: tuple[Node, int]) -> str | None:
    """Why attention cannot read heads that were repeated before it unrepeated, as a sentence."""
    if key[1] != value[1] or not _heads_fit(call, key):
        return "its heads are repeated in a way that is not grouped-query attention"
    if call.dropout_p != 0.0:
        return "it drops attention weights at random, and another kernel would draw others"
    reads = [(n, at) for at, (source, _) in ((call.key, key), (call.value, value)) for n in (at, source)]
    reasons = (why_not_read_later(view, n, at, call.node) for n, at in reads)
    return next((reason for reason in reasons if reason is not None), None)


def _heads_fit(call: Attention, key: tuple[Node, int]) -> bool:
    heads, groups = size_of(call.query, -3), size_of(key[0], -3)
    return isinstance(heads, int) and isinstance(groups, int) and heads == groups * key[1]
