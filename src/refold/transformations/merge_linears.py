"""MergeLinears: linear layers that read the same input become one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from refold.examples import Example, attention_layers, exported, layers
from refold.graph.view import Call, GraphView
from refold.patterns.parallel_layers import merged_path, parallel_layers
from refold.record.sharded_modules import is_fully_sharded
from refold.rewrite.description import added_setting
from refold.rewrite.editor import Editor
from refold.rewrite.operators import ADDMM, LINEAR
from refold.rewrite.refusal import Refuse
from refold.rewrite.rule import ReversibleRewrite, Site, Skip
from refold.weights.sharded import layout_of, parts_along


@dataclass(frozen=True, kw_only=True, repr=False)
class MergeLinears(ReversibleRewrite):
    """Merge linear layers that read the same input into one wider layer, and slice its output.

    `y₁ = x·W₁ᵀ + b₁, y₂ = x·W₂ᵀ + b₂`  becomes  `y = x·[W₁; W₂]ᵀ + [b₁; b₂]`, `y₁ = y[…, :n₁]`, `y₂ = y[…, n₁:]`.

    One large matrix product uses the machine better than several small ones (query, key and value; gate and up). Where
    only some layers have a bias, those come first and the joint bias is padded with zeros when it is used, so that a
    layer without a bias never gains one, not even by training. The originals come back by slicing the current weights.
    While merged, the original parameters share the merged memory: nothing is held twice. Weights of (in, out), as those
    of GPT-2's Conv1D (`addmm` on rows), are joined by columns, and their memory is not shared.

    With `shards=n` the joint weight is made of n blocks, each of which holds that part of the rows of every layer: it
    can be divided among n ranks (`ColwiseParallel`), and each has its own rows of all layers. Weights that are divided
    already (DTensors) are joined like this without being gathered.
    """

    shards: int = added_setting(1)

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return [
            attention_layers.attention(),
            layers.gated(),
            layers.functional(),
            exported(attention_layers.attention()),
            layers.conv1ds(),
        ]

    def __post_init__(self) -> None:
        if type(self.shards) is not int or self.shards < 1:
            raise ValueError(f"shards must be a number of ranks, 1 or more, not {self.shards!r}")

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        differ_in = "dtype, device, placement, training mode, in what is frozen, or, in blocks, in having a bias"
        return parallel_layers(view, _match, self._traits, "linear layer", differ_in)

    def rewrite(self, site: Site, edit: Editor) -> None:
        path = edit.free_path(merged_path(call.name for call in site.detail))
        calls = sorted(site.detail, key=lambda call: call.bias is None)  # so that the joint bias is one piece
        blocks = self._blocks(edit.gm, calls[0])
        merged = edit.merged_layer(site.nodes[0], calls, path, blocks)
        edit.slice_up(calls, merged, axis=-1, blocks=blocks)

    def _blocks(self, gm: GraphModule, call: Call) -> int:
        """Of how many blocks the joint weight is made: one for each rank that computes with its own rows."""
        parts = 1 if is_fully_sharded(gm) else parts_along(call.weight, call.out_axis)
        return parts if parts > 1 else self.shards

    def _traits(self, view: GraphView, call: Call) -> tuple[Any, ...]:
        """What layers must have in common to be merged."""
        weight, bias = call.weight, call.bias
        module = view.module(call.path) if call.path else view.gm
        blocks = self._blocks(view.gm, call)
        if call.width % blocks:
            raise Refuse(f"its {call.width} outputs cannot be divided evenly among {blocks} ranks")
        return (
            (weight.dtype, weight.device, weight.requires_grad),
            (call.out_axis, weight.shape[1 - call.out_axis]),
            None if bias is None or bias.requires_grad == weight.requires_grad else bias.requires_grad,
            bias is None or bias.dtype == weight.dtype or bias.dtype,
            module and module.training,
            layout_of(weight),
            blocks > 1 and bias is None,
        )


def _match(view: GraphView, node: Node) -> Call | None:
    return LINEAR.match(view, node) or ADDMM.match(view, node)
