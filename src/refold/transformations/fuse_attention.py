"""FuseAttention: attention that is written out becomes one call, and repeated heads become grouped-query attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.fx import Node

from refold.attention import Attention, match_attention, size_of
from refold.attention_pattern import Written, match_written, unrepeated, why_not_fusible
from refold.edit import Editor
from refold.layout import VIEWS, readers_behind
from refold.mask_analysis import Analysis
from refold.match import GraphView, rank_of
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
    masks that may block a whole row (softmax gives NaN there, fused attention 0). `grouped=False` leaves repeated heads
    alone.
    """

    kind: ClassVar[str] = "graph"
    grouped: bool = True

    @classmethod
    def examples(cls) -> Iterable[Example]:
        from refold import examples

        return [examples.written_attention(), examples.biased_attention(), examples.grouped_attention()]

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        taken: set[Node] = set()
        found: list[Written] = []
        for node in view.nodes:
            match = match_written(view, node)
            if isinstance(match, str):
                yield Skip(node, match)
            elif match is not None:
                found.append(match)
        masks = [mask for match in found for mask in match.masks]
        analysis = cache(lambda: Analysis(view, masks))
        for match in found:
            reason = why_not_fusible(view, match, analysis) or why_not_sliceable(view, match.last)
            if reason is None and not taken.isdisjoint(match.nodes):
                reason = "its steps are part of other attention"
            if reason is not None:
                yield Skip(match.softmax, reason)
                continue
            taken |= set(match.nodes)
            yield Site(match.nodes, f"{match.last.name} is attention and becomes one call", match)
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
            if key[1] != value[1] or not _heads_fit(call, key):
                yield Skip(node, "its heads are repeated in a way that is not grouped-query attention")
                continue
            yield Site((node,), f"{node.name}: heads repeated {key[1]} times are read once", (call, key[0], value[0]))

    def rewrite(self, site: Site, edit: Editor) -> None:
        if isinstance(site.detail, Written):
            self._fuse(site.detail, edit)
            return
        call, key, value = site.detail
        call.write(key=key, value=value, enable_gqa=True)
        self.mark_as_transformed(call.node)
        erase_dead(edit, [call.key, call.value])

    def _fuse(self, found: Written, edit: Editor) -> None:
        exported = isinstance(found.last.target, torch._ops.OpOverload)
        steps = _Steps(edit, found.last, exported)
        key = found.key if found.key is not None else steps.call("transpose", found.keys, -2, -1)
        operands: list[Node] = [found.query, key, found.value]
        flat = rank_of(found.query) == 3  # kernels want heads: take the batch for them
        if flat:
            operands = [steps.call("unsqueeze", node, 0) for node in operands]
        mask = steps.sum(found.masks)
        if mask is not None and flat and rank_of(mask) == 3:
            mask = steps.call("unsqueeze", mask, 0)
        target = aten.scaled_dot_product_attention.default if exported else F.scaled_dot_product_attention
        given: dict[str, Any] = {"scale": found.scale} | ({} if mask is None else {"attn_mask": mask})
        fused = edit.call(found.last, target, *operands, **given)
        self.mark_as_transformed(fused)
        result = steps.call("squeeze", fused, 0) if flat else fused
        edit.replace_uses(found.last, result)
        fused.meta.setdefault("val", result.meta.get("val"))
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
        value = args[0].meta.get("val")
        if isinstance(value, torch.Tensor) and name != "squeeze":
            node.meta["val"] = getattr(value, name)(*args[1:])
        return node

    def sum(self, masks: tuple[Node, ...]) -> Node | None:
        """All masks as one; layers that add the same ones share the sum."""
        if len(masks) > 1 and masks not in self.edit.shared:
            joint = masks[0]
            for mask in masks[1:]:
                values = joint.meta["val"], mask.meta["val"]
                joint = self.edit.call(self.before, aten.add.Tensor if self.exported else torch.add, joint, mask)
                joint.meta["val"] = values[0] + values[1]
            self.edit.shared[masks] = joint
        return self.edit.shared[masks] if len(masks) > 1 else next(iter(masks), None)


def _heads_fit(call: Attention, key: tuple[Node, int]) -> bool:
    heads, groups = size_of(call.query, -3), size_of(key[0], -3)
    return isinstance(heads, int) and isinstance(groups, int) and heads == groups * key[1]
