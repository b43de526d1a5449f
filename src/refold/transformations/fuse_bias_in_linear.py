"""FuseBiasInLinear: the bias of a linear layer becomes a column of its weight."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.fx import Node

from refold.examples import Example, attention_layers, exported, layers
from refold.graph.view import Call, GraphView
from refold.rewrite.editor import Editor
from refold.rewrite.operators import LINEAR
from refold.rewrite.refusal import Refuse, own
from refold.rewrite.rule import ReversibleRewrite, Site
from refold.weights import AppendColumn

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, repr=False)
class FuseBiasInLinear(ReversibleRewrite):
    """Append the bias to the weight as a column, and a one to the input.

    `y = x·Wᵀ + b`  becomes  `y = [x, 1]·[W | b]ᵀ`.

    The one is padded onto the input, so it has the input's dtype and device and any leading shape; layers that read
    the same input share it. Weight and bias come back by slicing the current weight.
    """

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return [attention_layers.attention(), layers.functional(), exported(attention_layers.attention())]

    def match(self, view: GraphView, node: Node) -> Site | None:
        call = LINEAR.match(view, node)
        if call is None:
            return None
        _check_bias(call)
        own(view, call)
        what = f"fused the bias of {call.path or call.operands['weight'].name}"
        return Site((node,), what, (call, view.region(node)))

    def rewrite(self, site: Site, edit: Editor) -> None:
        call, region = site.detail
        names = {role: call.operands[role].name for role in ("weight", "bias")}
        fused = edit.map_weights(AppendColumn(), names, {"weight": names["weight"]})["weight"]
        pad = aten.pad.default if call.kind == "aten" else F.pad
        key = (call.input, pad, region)
        if key not in edit.shared:
            edit.shared[key] = edit.call(call.node, pad, call.input, [0, 1], "constant", 1.0)
        edit.replace_layer(call, input=edit.shared[key], weight=fused, bias=None)


def _check_bias(call: Call) -> None:
    weight, bias = call.weight, call.bias
    if bias is None:
        raise Refuse("it has no bias")
    if bias.dtype != weight.dtype or bias.device != weight.device:
        raise Refuse("its weight and bias differ in dtype or device")
    if bias.requires_grad != weight.requires_grad:
        raise Refuse("one of its weight and bias is frozen and the other is not")
    if bias.shape != weight.shape[:1]:
        raise Refuse("its bias is not one number for each output")
