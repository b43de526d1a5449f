"""SimplifyAttentionMask: a mask that provably masks nothing is dropped, a causal one becomes `is_causal`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from refold.examples import attention_layers
from refold.graph.values import example_value, proves_shapes, same_size, size_of
from refold.graph.view import GraphView
from refold.patterns.masks.verdict import Verdict, copies_behind, find_verdict
from refold.rewrite.editor import Editor
from refold.rewrite.operators import Attention, match_attention
from refold.rewrite.refusal import Refuse, unchanged_between
from refold.rewrite.rule import Example, ReversibleRewrite, Site


@dataclass(frozen=True, kw_only=True, repr=False)
class SimplifyAttentionMask(ReversibleRewrite):
    """Take masks out of attention that the attention kernels can do without, so that the fast ones are used.

    `softmax(s·q·kᵀ + M)·v`  with `M[i,j] = 0` for all i, j        becomes  the same without a mask;
    `softmax(s·q·kᵀ + M)·v`  with `M[i,j] = 0 if j ≤ i else −∞`    becomes  `is_causal=True`;
    `M = where(true everywhere, B, −∞)`                            becomes  `M = B`.

    Nothing is tried out on sizes: the mask's computation is read as a formula of its indices, and the formula is proven
    for all of them, whatever the sizes (`refold.patterns.masks`); where sizes are fixed, also by evaluating it once. A
    mask that depends on an input, a parameter or a checkpoint is left alone. The smallest number of its dtype stands
    for −∞: since the diagonal is never masked, both give a weight of exactly 0.
    """

    kind: ClassVar[str] = "graph"

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return [
            attention_layers.causal_attention(),
            attention_layers.all_seeing_attention(),
            attention_layers.additive_causal_attention(),
        ]

    def match(self, view: GraphView, node: Node) -> Site | None:
        call = match_attention(node)
        if call is None or not isinstance(call.attn_mask, Node):
            return None
        verdict = find_verdict(view, call.attn_mask)
        _check_fits(view, call, verdict)
        return Site((node,), f"{node.name}: {_SAYS[verdict.kind]}", (call, verdict))

    def rewrite(self, site: Site, edit: Editor) -> None:
        call, verdict = site.detail
        if verdict.kind == "causal":
            call.write(attn_mask=None, is_causal=True)
        else:
            call.write(attn_mask=None if verdict.where is None else _chosen(edit, verdict.where, call.node))
        edit.mark(call.node)
        edit.erase_unused([call.attn_mask])


_SAYS = {
    "all": "its mask masks nothing and is dropped",
    "causal": "its mask is causal and becomes is_causal",
    "chosen": "the condition of its mask always holds",
}


def _check_fits(view: GraphView, call: Attention, verdict: Verdict) -> None:
    """Refuse where something else about the call stands in the way of a verdict."""
    if call.is_causal is not False:
        raise Refuse("it is given a mask and is_causal at once")
    if call.dropout_p != 0.0:
        raise Refuse("it drops attention weights at random, and another kernel would draw others")
    if verdict.kind == "causal" and not _is_square(call):
        raise Refuse("its mask is causal, but query and key are not surely of one length")
    if verdict.where is not None:
        for value in (verdict.where.args[1], *copies_behind(call.attn_mask)):
            unchanged_between(view, value, verdict.where, call.node)  # type: ignore[arg-type]


def _is_square(call: Attention) -> bool:
    queries, recorded = size_of(call.query, -2), example_value(call.query)
    proven_sizes = recorded is not None and proves_shapes(recorded) and queries is not None
    return call.query is call.key or (proven_sizes and same_size(queries, size_of(call.key, -2)))


def _chosen(edit: Editor, where: Node, before: Node) -> Node:
    """What `where` always chooses, in one piece as `where` made it: some kernels need that."""
    if where not in edit.shared:
        edit.shared[where] = edit.insert(before, "contiguous", where.args[1])  # type: ignore[arg-type]
        edit.mark(edit.shared[where])
    return edit.shared[where]
