"""MergeConvolutions: convolutions of equal geometry that read the same input become one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from refold.examples import Example, layers
from refold.graph.view import Call, GraphView
from refold.patterns.parallel_layers import merged_path, parallel_layers
from refold.rewrite.editor import Editor
from refold.rewrite.operators import CONVOLUTION
from refold.rewrite.refusal import Refuse
from refold.rewrite.rule import ReversibleRewrite, Site, Skip


@dataclass(frozen=True, kw_only=True, repr=False)
class MergeConvolutions(ReversibleRewrite):
    """Merge convolutions that read the same input and have the same kernel size, stride, padding and dilation.

    `y₁ = W₁ ∗ x + b₁, y₂ = W₂ ∗ x + b₂`  becomes  `y = [W₁; W₂] ∗ x + [b₁; b₂]`, `y₁ = y[:, :n₁]`, `y₂ = y[:, n₁:]`
    (the channel axis counted from the last one, so that an input without a batch is right too).

    Grouped convolutions are left alone: their output channels would belong to other groups. All or none must have a
    bias. The originals come back by slicing the current weights, and share the merged memory meanwhile.
    """

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return [layers.branches(), layers.exported_branches()]

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        differ_in = "geometry, dtype, device, bias, training mode or in what is frozen"
        return parallel_layers(view, CONVOLUTION.match, _traits, "convolution", differ_in)

    def rewrite(self, site: Site, edit: Editor) -> None:
        calls: list[Call] = site.detail
        path = edit.free_path(merged_path(call.name for call in calls))
        merged = edit.merged_layer(site.nodes[0], calls, path)
        edit.slice_up(calls, merged, axis=-1 - calls[0].dims)


def _traits(view: GraphView, call: Call) -> tuple[Any, ...]:
    """What convolutions must have in common to be merged."""
    if call.settings["groups"] != 1:
        raise Refuse("it is grouped")
    if any(isinstance(value, Node) for value in call.given.values()):
        raise Refuse("its geometry is computed")
    weight, bias = call.weight, call.bias
    module = view.module(call.path) if call.path else None
    return (
        (weight.dtype, weight.device, weight.requires_grad, weight.shape[1:]),
        None if bias is None else (bias.dtype, bias.requires_grad),
        call.kind if module is not None else call.node.target,
        tuple(sorted(call.settings.items())),
        (view.gm if module is None else module).training,
    )
