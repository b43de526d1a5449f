"""FuseAttention: decomposed attention becomes one call, and repeated heads become grouped-query attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from refold.examples import attention_layers
from refold.graph.aliasing import writes_to
from refold.graph.layout import VIEWS, make_reshape, readers_behind, tells_layout
from refold.graph.values import rank_of
from refold.graph.view import GraphView
from refold.patterns.decomposed_attention import DecomposedAttention, check_fusible, match_decomposed
from refold.patterns.repeated_heads import match_repeated, unrepeated
from refold.rewrite.editor import Editor, make_views_reshapes, make_whole_for_others
from refold.rewrite.operators import Attention, match_attention
from refold.rewrite.refusal import Refuse, attempt, sliceable
from refold.rewrite.rule import Example, ReversibleRewrite, Site, Skip

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, repr=False)
class FuseAttention(ReversibleRewrite):
    """Call `scaled_dot_product_attention` for decomposed attention, which is computed in single steps.

    `softmax(c·q·kᵀ + M)·v`  becomes  `scaled_dot_product_attention(q, k, v, attn_mask=M, scale=c)`;
    k and v whose heads were repeated n times (grouped queries) are read unrepeated, with `enable_gqa=True`.

    Casts between scores and weights (a softmax in float32) go, since the fused kernels compute in float32 at least.
    Left alone: weights that something else reads (output_attentions), dropout in training, a scale that is computed,
    operands that are written into before the last product, masks that may block a whole row (softmax gives NaN there,
    fused attention 0; see `refold.patterns.masks.bounds`). `grouped=False` leaves repeated heads alone.
    """

    kind: ClassVar[str] = "graph"
    grouped: bool = True

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return [
            attention_layers.decomposed_attention(),
            attention_layers.biased_attention(),
            attention_layers.grouped_attention(),
        ]

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        found: list[DecomposedAttention] = []
        for node in view.nodes:
            match = attempt(match_decomposed, view, node)
            if isinstance(match, Refuse):
                yield Skip(node, match.reason)
            elif match is not None:
                found.append(match)
        for match in sorted(found, key=lambda match: view.position[match.last]):
            refusal = attempt(_check, view, match)
            if isinstance(refusal, Refuse):
                yield Skip(match.softmax, refusal.reason)
                continue
            what = f"{match.last.name} is attention and becomes one call"
            yield Site(match.nodes, what, (match, _sum_is_shared(view, match.masks)))
        if self.grouped:
            yield from super().find(view)

    def match(self, view: GraphView, node: Node) -> Site | None:
        """Attention on repeated heads."""
        call = attempt(match_attention, node)
        times = match_repeated(view, call) if isinstance(call, Attention) else None
        return None if times is None else Site((node,), f"{node.name}: heads repeated {times} times are read once")

    def rewrite(self, site: Site, edit: Editor) -> None:
        if site.detail is not None:
            found, share_sum = site.detail
            _fuse(found, share_sum, edit)
            return
        call = match_attention(site.nodes[0])
        assert call is not None
        (key, _), (value, _) = unrepeated(call.key), unrepeated(call.value)  # type: ignore[misc]
        call.write(key=key, value=value, enable_gqa=True)
        edit.mark(call.node)
        edit.erase_unused({call.key, call.value})


def _check(view: GraphView, found: DecomposedAttention) -> None:
    check_fusible(view, found)
    for reader in readers_behind(view.gm, found.last):
        if tells_layout(reader):
            raise Refuse(f"{reader.name} depends on the memory layout of its output")
    sliceable(view, found.last)


def _sum_is_shared(view: GraphView, masks: tuple[Node, ...]) -> bool:
    """Whether masks are the same for all layers that add them: nothing writes into them once they are there."""
    return not any(writes_to(view.gm, mask, view.writers_between(mask, view.nodes[-1])) for mask in masks)


def _fuse(found: DecomposedAttention, share_sum: bool, edit: Editor) -> None:
    last = found.last
    query, keys, value = found.operands
    key = found.key if found.key is not None else edit.insert(last, "transpose", keys, -2, -1)
    operands: list[Node] = [query, key, value]
    flat = rank_of(query) == 3  # kernels want heads: take the batch for them
    if flat:
        operands = [edit.insert(last, "unsqueeze", node, 0) for node in operands]
    mask = _sum(edit, last, found.masks, share_sum)
    if mask is not None and flat and rank_of(mask) == 3:
        mask = edit.insert(last, "unsqueeze", mask, 0)
    exported = isinstance(last.target, torch._ops.OpOverload)
    target = aten.scaled_dot_product_attention.default if exported else F.scaled_dot_product_attention
    given: dict[str, Any] = {"scale": found.scale} | ({} if mask is None else {"attn_mask": mask})
    result = edit.call(last, target, *operands, **given)
    _replace(found, edit.insert(last, "squeeze", result, 0) if flat else result, edit)


def _sum(edit: Editor, before: Node, masks: tuple[Node, ...], share: bool) -> Node | None:
    """All masks as one; layers that add the same ones share the sum."""
    if len(masks) < 2:
        return next(iter(masks), None)
    if not share or masks not in edit.shared:
        joint = masks[0]
        for mask in masks[1:]:
            joint = edit.insert(before, "add", joint, mask)
        edit.shared[masks] = joint
    return edit.shared[masks]


def _replace(found: DecomposedAttention, result: Node, edit: Editor) -> None:
    """Let all read the result; the kernels lay it out as they like."""
    edit.replace_uses(found.last, result)
    make_views_reshapes(edit.gm, result)
    behind = list(readers_behind(edit.gm, result))
    make_whole_for_others(edit.gm, result, behind)
    for reader in behind:
        if reader.target in VIEWS:
            make_reshape(reader)
    inputs = [n for node in found.nodes for n in node.all_input_nodes if n not in found.nodes]
    for node in reversed(found.nodes):
        edit.graph.erase_node(node)
    edit.erase_unused(inputs)
