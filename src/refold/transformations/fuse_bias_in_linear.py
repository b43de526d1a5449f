"""FuseBiasInLinear: the bias of a linear layer becomes a column of its weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from refold.aliasing import switches_mode, written_by
from refold.edit import Editor
from refold.match import Call, GraphView, match_linear
from refold.rewrite import Example, ReversibleRewrite, Site, Skip
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
        from refold.testing import models

        return [models.attention(), models.functional(), models.exported(models.attention())]

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        era = 0  # layers on one input share the padded input until something is written in place or a mode is switched
        for node in view.nodes:
            era += bool(switches_mode(node) or written_by(view.gm, node))
            call = match_linear(view, node)
            if call is None:
                continue
            reason = call if isinstance(call, str) else _why_not(view, call)
            if reason is not None:
                yield Skip(node, reason)
            elif isinstance(call, Call):
                yield Site((node,), f"fused the bias of {call.path or call.operands['weight'].name}", (call, era))

    def rewrite(self, site: Site, edit: Editor) -> None:
        call, era = site.detail
        names = {role: call.operands[role].name for role in ("weight", "bias")}
        fused = edit.map_weights(AppendColumn(), names, {"weight": names["weight"]})["weight"]
        weight = nn.Parameter(fused, requires_grad=call.weight.requires_grad)
        padded = self._padded(edit, call, era)
        if call.path is not None:
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            layer.weight = weight
            layer.train(edit.gm.get_submodule(call.path).training)
            edit.put_module(call.path, layer)
            call.node.args, call.node.kwargs = (padded,), {}
        else:
            fetches = [n for n in call.node.all_input_nodes if n.op == "get_attr"]
            fetch = next(n for n in fetches if n.target == names["weight"])
            call.node.args, call.node.kwargs = (padded, fetch), {}
            for unused in [n for n in fetches if not n.users]:
                edit.graph.erase_node(unused)
            edit.remove(names["bias"])
            edit.put_tensor(names["weight"], weight)
        self.mark_as_transformed(call.node)

    def _padded(self, edit: Editor, call: Call, era: int) -> Node:
        """The input with a one behind it."""
        pad = aten.pad.default if call.kind == "aten" else F.pad
        key = (call.input, pad, era)
        if key not in edit.shared:
            edit.shared[key] = edit.call(call.node, pad, call.input, [0, 1], "constant", 1.0)
            self.mark_as_transformed(edit.shared[key])
        return edit.shared[key]


def _why_not(view: GraphView, call: Call) -> str | None:
    if call.bias is None:
        return "it has no bias"
    if call.bias.dtype != call.weight.dtype or call.bias.device != call.weight.device:
        return "its weight and bias differ in dtype or device"
    if call.bias.requires_grad != call.weight.requires_grad:
        return "one of its weight and bias is frozen and the other is not"
    if call.bias.shape != call.weight.shape[:1]:
        return "its bias is not one number for each output"
    return view.why_shared(call)
