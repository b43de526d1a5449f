"""MergeLora: a linear layer and the low-rank adapter next to it become one linear layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from refold.examples import Example, layers
from refold.graph.aliasing import memory_roots, switches_mode, writes_to, written_by
from refold.graph.view import Call, GraphView
from refold.patterns.low_rank_adapters import CASTS, PRODUCTS, Adapter, match_adapted
from refold.rewrite.description import Keep
from refold.rewrite.editor import Editor
from refold.rewrite.refusal import Refuse, own
from refold.rewrite.rule import ReversibleRewrite, Site
from refold.weights import AddLowRank


@dataclass(frozen=True, kw_only=True, repr=False)
class MergeLora(ReversibleRewrite):
    """Merge a low-rank adapter into the linear layer that it stands next to.

    `y = x·Wᵀ + b + c·(x·Aᵀ)·Bᵀ`  becomes  `y = x·W'ᵀ + b` with `W' = W + c·B·A`.

    Computed in float64 and rounded once, by a sum over the rank in a fixed order. W comes back by `W' − c·B·A` and a
    stored correction, bit for bit, however often it is done; A and B are kept as they are. Works on plain torch code
    and on a captured PEFT model; several adapters on one layer are merged one after the other.
    """

    kind: ClassVar[str] = "parametric"
    keep: Keep = "correction"

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return [layers.adapted()]

    def match(self, view: GraphView, node: Node) -> Site | None:
        found = match_adapted(view, node)
        if found is None:
            return None
        base, adapter = found
        _check_shapes(base, adapter)
        _check_readers(node, base, adapter)
        _check_dtype(node, base, adapter)
        _check_same_input(view, base, adapter)
        for call in (base, adapter.up, adapter.down):
            own(view, call)
        name = base.path or base.operands["weight"].name
        return Site((node, base.node, *adapter.nodes), f"merged the adapter of {name}", found)

    def rewrite(self, site: Site, edit: Editor) -> None:
        total, (base, adapter) = site.nodes[0], site.detail
        calls = {"weight": base, "a": adapter.down, "b": adapter.up}
        sources = {role: call.operands["weight"].name for role, call in calls.items()}
        operation, targets = AddLowRank(adapter.scaling), {"weight": sources["weight"]}
        new = edit.map_weights(operation, sources, targets, self.keep)
        edit.replace_layer(base, weight=new["weight"])
        edit.replace_uses(total, base.node)
        for node in (total, *adapter.nodes):
            edit.erase(node)
        for call in (adapter.down, adapter.up):
            edit.remove_layer(call)


def _check_shapes(base: Call, adapter: Adapter) -> None:
    up, down = adapter.up.weight, adapter.down.weight
    if adapter.up.bias is not None or adapter.down.bias is not None:
        raise Refuse("its adapter has a bias")
    if up.shape[1] != down.shape[0] or (up.shape[0], down.shape[1]) != tuple(base.weight.shape):
        raise Refuse("its adapter does not have its shape")
    if len({weight.device for weight in (base.weight, up, down)}) > 1:
        raise Refuse("it and its adapter are on different devices")


def _check_readers(total: Node, base: Call, adapter: Adapter) -> None:
    for node in (base.node, *adapter.nodes):
        others = [user.name for user in node.users if user is not total and user not in adapter.nodes]
        if others:
            raise Refuse(f"{node.name} is also read by {', '.join(others)}")


def _check_dtype(total: Node, base: Call, adapter: Adapter) -> None:
    """What follows must get the layer's own dtype: the adapter has it, or the sum is cast to it at once."""
    dtype = base.weight.dtype
    if torch.promote_types(adapter.up.weight.dtype, dtype) == dtype:
        return
    if not total.users or not all(user.target in CASTS and dtype in user.args for user in total.users):
        raise Refuse("its adapter computes in another dtype, which the sum would have")


def _check_same_input(view: GraphView, base: Call, adapter: Adapter) -> None:
    """The layer and its adapter must see the same values, in the same mode."""
    for node in adapter.nodes:
        if node.target in PRODUCTS and not memory_roots(view.gm, *written_by(view.gm, node)) <= set(adapter.nodes):
            raise Refuse(f"{node.name} scales what its adapter reads in place")
    places = [view.position[node] for node in (base.node, *adapter.nodes)]
    span = view.nodes[min(places) : max(places) + 1]
    writer = writes_to(view.gm, base.input, [node for node in span if written_by(view.gm, node)])
    if writer is not None:
        raise Refuse(f"{writer.name} writes into its input between it and its adapter")
    for switch in filter(switches_mode, span):
        raise Refuse(f"{switch.name} switches gradients or autocast between it and its adapter")
