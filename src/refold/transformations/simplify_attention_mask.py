"""SimplifyAttentionMask: a mask that provably masks nothing is dropped, a causal one becomes `is_causal`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from refold.attention import Attention, match_attention, same_size, size_of, why_not_read_later
from refold.edit import Editor
from refold.index_expressions import Assumption, Unknown, why_unknown
from refold.mask_analysis import Analysis, Value
from refold.match import GraphView, example_value, proves_shapes
from refold.purity import erase_dead, name_of
from refold.rewrite import Example, ReversibleRewrite, Site, Skip

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, repr=False)
class SimplifyAttentionMask(ReversibleRewrite):
    """Take masks out of attention that the attention kernels can do without, so that the fast ones are used.

    `softmax(s·q·kᵀ + M)·v`  with `M[i,j] = 0` for all i, j        becomes  the same without a mask;
    `softmax(s·q·kᵀ + M)·v`  with `M[i,j] = 0 if j ≤ i else −∞`    becomes  `is_causal=True`;
    `M = where(true everywhere, B, −∞)`                            becomes  `M = B`.

    Nothing is tried out on sizes: the mask's computation is read as a formula of its indices, and the formula is proven
    for all of them, whatever the sizes (`refold.mask_analysis`); where sizes are fixed, also by evaluating it once. A
    mask that depends on an input, a parameter or a checkpoint is left alone. The smallest number of its dtype stands
    for −∞: beside the diagonal, which is never masked, both give a weight of exactly 0.
    """

    kind: ClassVar[str] = "graph"

    @classmethod
    def examples(cls) -> Iterable[Example]:
        from refold import examples

        return [examples.causal_attention(), examples.all_seeing_attention(), examples.additive_causal_attention()]

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        calls: list[Attention] = []
        for node in view.nodes:
            call = match_attention(node)
            if isinstance(call, str):
                yield Skip(node, call)
            elif call is not None and isinstance(call.attn_mask, Node):
                calls.append(call)
        analysis = Analysis(view, [call.attn_mask for call in calls])
        verdicts: dict[Node, Any] = {}
        for call in calls:
            if call.attn_mask not in verdicts:
                verdicts[call.attn_mask] = _verdict(analysis, call.attn_mask)
            found = _fitting(view, call, verdicts[call.attn_mask])
            if isinstance(found, str):
                yield Skip(call.node, found)
            else:
                yield Site((call.node,), f"{call.node.name}: {_SAYS[found[0]]}", (call, *found))

    def rewrite(self, site: Site, edit: Editor) -> None:
        call, verdict, where = site.detail
        if verdict == "causal":
            call.write(attn_mask=None, is_causal=True)
        else:
            call.write(attn_mask=None if where is None else self._contiguous(edit, where, call))
        self.mark_as_transformed(call.node)
        erase_dead(edit, [call.attn_mask])

    def _contiguous(self, edit: Editor, where: Node, call: Attention) -> Node:
        """What `where` always chooses in one piece, as `where` made it: some kernels need that."""
        if where not in edit.shared:
            exported, chosen = isinstance(call.node.target, torch._ops.OpOverload), where.args[1]
            copied = edit.call(call.node, aten.contiguous.default if exported else ".contiguous", chosen)
            copied.meta = {k: v for k, v in chosen.meta.items() if k in ("val", "tensor_meta")}  # type: ignore[union-attr]
            self.mark_as_transformed(copied)
            edit.shared[where] = copied
        return edit.shared[where]


_SAYS = {
    "all": "its mask masks nothing and is dropped",
    "causal": "its mask is causal and becomes is_causal",
    "chosen": "the condition of its mask always holds",
}

Verdict = tuple[str, Node | None]
"""What is proven; where a condition always holds, also the `where` that asks for it."""


def _verdict(analysis: Analysis, mask: Node) -> Verdict | str:
    """What a mask is proven to be, or why it is not, as a sentence."""
    value = analysis.of(mask)
    if isinstance(value, Value):
        found = proven(value)
        if found is not None:
            return found, None
    where = _always_chosen(analysis, mask)
    if where is not None:
        return "chosen", where
    reason = value.reason if isinstance(value, Unknown) else why_unknown(value.element)
    return f"its mask {mask.name} is not proven to be trivial: {reason or 'it is neither full nor causal'}"


def proven(value: Value) -> str | None:
    """Whether a mask lets everything through ('all') or is causal ('causal'); None if neither is proven."""
    sizes = {i - value.rank: size for i, size in enumerate(value.shape) if isinstance(size, int)}
    if _lets_through(Assumption(sizes).value(value.element), value.dtype):
        return "all"
    seen = Assumption(sizes, "seen").value(value.element)
    ahead = Assumption(sizes, "ahead").value(value.element)
    if not _lets_through(seen, value.dtype):
        return None
    if _lets_through(ahead, value.dtype):
        return "all"
    return "causal" if _blocks(ahead, value.dtype) else None


def _lets_through(value: bool | float | None, dtype: torch.dtype) -> bool:
    return value is True if dtype == torch.bool else value is not None and dtype.is_floating_point and value == 0


def _blocks(value: bool | float | None, dtype: torch.dtype) -> bool:
    if dtype == torch.bool or value is None or not dtype.is_floating_point:
        return value is False and dtype == torch.bool
    return value == -math.inf or value <= torch.finfo(dtype).min


def _always_chosen(analysis: Analysis, mask: Node) -> Node | None:
    """The node of a mask `where(condition, x, y)` whose condition is proven to hold everywhere."""
    where = _copies(mask)[-1]
    if where.op != "call_function" or name_of(where) != "where" or len(where.args) != 3:
        return None
    condition, chosen, _ = where.args
    if not isinstance(condition, Node) or not isinstance(chosen, Node):
        return None
    truth, made, noted = analysis.of(condition), example_value(where), example_value(chosen)
    if not isinstance(truth, Value) or proven(truth) != "all" or made is None or noted is None:
        return None
    fits = made.dtype == noted.dtype and all(map(same_size, made.shape[-2:], noted.shape[-2:]))
    return where if fits and noted.dim() >= 2 else None


def _copies(mask: Node) -> list[Node]:
    """A mask, what it is a copy of, and so on."""
    found = [mask]
    while found[-1].op in ("call_function", "call_method") and name_of(found[-1]) in ("contiguous", "clone", "alias"):
        found.append(found[-1].args[0])  # type: ignore[arg-type]
    return found


def _fitting(view: GraphView, call: Attention, verdict: Verdict | str) -> Verdict | str:
    """The verdict, unless something else about the call stands in its way."""
    if isinstance(verdict, str):
        return verdict
    if call.is_causal is not False:
        return "it is given a mask and is_causal at once"
    if call.dropout_p != 0.0:
        return "it drops attention weights at random, and another kernel would draw others"
    if verdict[0] == "causal" and not _square(call):
        return "its mask is causal, but query and key are not surely of one length"
    where = verdict[1]
    if where is None:
        return verdict
    reads = (where.args[1], *_copies(call.attn_mask))
    reasons = (why_not_read_later(view, value, where, call.node) for value in reads)  # type: ignore[arg-type]
    return next((reason for reason in reasons if reason is not None), verdict)


def _square(call: Attention) -> bool:
    queries, keys = size_of(call.query, -2), size_of(call.key, -2)
    noted = example_value(call.query)
    proven_sizes = noted is not None and proves_shapes(noted) and queries is not None
    return call.query is call.key or (proven_sizes and same_size(queries, keys))
