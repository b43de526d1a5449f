"""MergeLora: a linear layer and the low-rank adapter beside it become one linear layer."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from refold.aliasing import memory_roots, switches_mode, writes_to, written_by
from refold.edit import Editor, twin_of
from refold.match import Call, GraphView, match_linear, why_not_plain
from refold.rewrite import Example, ReversibleRewrite, Site, Skip
from refold.settings import Keep
from refold.weights import AddLowRank

aten = torch.ops.aten

_SUMS: set[Any] = {operator.add, operator.iadd, torch.add, aten.add.Tensor, aten.add_.Tensor, "add", "add_", "__add__"}
_PRODUCTS: set[Any] = {operator.mul, operator.imul, torch.mul, aten.mul.Tensor, aten.mul.Scalar, "mul", "mul_"}
_CASTS: set[Any] = {aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, "to", "float", "type_as"}
_DROPOUTS: set[Any] = {F.dropout, torch.dropout, aten.dropout.default}


@dataclass
class Adapter:
    """What was found between a layer's input and the sum with its output."""

    scaling: float = 1.0
    down: Call | None = None
    up: Call | None = None
    nodes: list[Node] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, repr=False)
class MergeLora(ReversibleRewrite):
    """Merge a low-rank adapter into the linear layer that it stands beside.

    `y = x·Wᵀ + b + c·(x·Aᵀ)·Bᵀ`  becomes  `y = x·W'ᵀ + b` with `W' = W + c·B·A`.

    Computed in float64 and rounded once, by a sum over the rank in a fixed order. W comes back by `W' − c·B·A` and a
    stored correction, bit for bit, however often it is done; A and B are kept as they are. Works on plain torch code
    and on a captured PEFT model; several adapters on one layer are merged one after the other.
    """

    kind: ClassVar[str] = "parametric"
    keep: Keep = "correction"

    @classmethod
    def examples(cls) -> Iterable[Example]:
        yield _Adapted().eval(), (torch.randn(3, 6),)

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        for node in view.nodes:
            found = match_adapted(view, node)
            if isinstance(found, str):
                yield Skip(node, found)
            elif found is not None:
                base, adapter = found
                name = base.path or base.operands["weight"].name
                yield Site((node, base.node, *adapter.nodes), f"merged the adapter of {name}", found)

    def rewrite(self, site: Site, edit: Editor) -> None:
        base, adapter = site.detail
        assert adapter.up is not None and adapter.down is not None
        weight = base.operands["weight"].name
        sources = {"weight": weight, "a": adapter.down.operands["weight"].name, "b": adapter.up.operands["weight"].name}
        merged = edit.map_weights(AddLowRank(adapter.scaling), sources, {"weight": weight}, self.keep)["weight"]
        parameter = nn.Parameter(merged, requires_grad=base.weight.requires_grad)
        if base.path is not None:
            edit.put_module(base.path, twin_of(edit.gm.get_submodule(base.path), weight=parameter))
        else:
            edit.put_tensor(weight, parameter)
        edit.replace_uses(site.nodes[0], base.node)
        for node in (site.nodes[0], *adapter.nodes):
            edit.erase(node)
        for call in (adapter.down, adapter.up):
            edit.remove(call.path or call.operands["weight"].name)
        self.mark_as_transformed(base.node)


def match_adapted(view: GraphView, node: Node) -> tuple[Call, Adapter] | str | None:
    """The layer and the adapter that a sum adds, a reason why they cannot be merged, or None for another node."""
    terms = _terms(node)
    if terms is None:
        return None
    for plain, other in (terms, terms[::-1]):
        base = match_linear(view, plain)
        if base is None:
            continue
        source = base.input if isinstance(base, Call) else next(iter(plain.all_input_nodes), None)
        adapter = _follow(view, other, source)
        if adapter is None:
            continue
        if isinstance(base, str):
            return base
        reason = adapter if isinstance(adapter, str) else _why_not(view, node, base, adapter)
        return reason if reason is not None else (base, adapter)  # type: ignore[return-value]
    return None


def _terms(node: Node) -> tuple[Node, Node] | None:
    if node.op not in ("call_function", "call_method") or node.target not in _SUMS:
        return None
    values = [*node.args, *(v for k, v in node.kwargs.items() if k != "alpha")]
    if len(values) != 2 or not all(isinstance(v, Node) for v in values) or node.kwargs.get("alpha", 1) != 1:
        return None
    return values[0], values[1]  # type: ignore[return-value]


def _follow(view: GraphView, node: Node, source: Node | None) -> Adapter | str | None:
    """Go up from a sum's term to the layer's input: scalings, casts and idle dropouts, and two thin linear layers."""
    adapter, linears, reason = Adapter(), 0, ""
    while node is not source:
        adapter.nodes.append(node)
        linear = match_linear(view, node)
        if linear is not None:
            linears += 1
            if isinstance(linear, str):
                reason = reason or f"its adapter's {node.name} is left alone: {linear}"
            elif linears == 1:
                adapter.up = linear
            else:
                adapter.down = linear
            node = node.all_input_nodes[0]
            continue
        step = _step(view, node)
        if step is None:
            return None
        if isinstance(step, str):
            reason, step = reason or step, (node.all_input_nodes[0], 1.0)
        node, factor = step
        adapter.scaling *= factor
    if linears != 2:
        return None
    return reason or adapter


def _step(view: GraphView, node: Node) -> tuple[Node, float] | str | None:
    """What a node that scales, casts or does nothing reads, and its factor."""
    inputs = node.all_input_nodes
    if len(inputs) != 1:
        return None
    if node.op == "call_module":
        module = view.module(str(node.target))
        if not isinstance(module, nn.Dropout | nn.Identity):
            return None
        odd = why_not_plain(module, (nn.Dropout, nn.Identity))
        if odd is not None:
            return f"its adapter's {node.name} is left alone: {odd}"
        if isinstance(module, nn.Dropout) and module.training and module.p > 0:
            return "its adapter's dropout is active; call eval() first"
        return inputs[0], 1.0
    if node.target in _PRODUCTS:
        numbers = [a for a in (*node.args, *node.kwargs.values()) if not isinstance(a, Node)]
        number = numbers[0] if len(numbers) == 1 else None
        return (inputs[0], float(number)) if type(number) in (int, float) else None  # type: ignore[arg-type]
    if node.target in _DROPOUTS:
        active = node.kwargs.get("training", node.args[2] if len(node.args) > 2 else node.target is not torch.dropout)
        return "its adapter's dropout is active; call eval() first" if active is not False else (inputs[0], 1.0)
    return (inputs[0], 1.0) if node.target in _CASTS else None


def _why_not(view: GraphView, total: Node, base: Call, adapter: Adapter) -> str | None:
    assert adapter.up is not None and adapter.down is not None
    for call in (adapter.up, adapter.down):
        if call.bias is not None:
            return "its adapter has a bias"
    for reader in (base.node, *adapter.nodes):
        others = [user.name for user in reader.users if user is not total and user not in adapter.nodes]
        if others:
            return f"{reader.name} is also read by {', '.join(others)}"
    shapes = (adapter.up.weight.shape, adapter.down.weight.shape, base.weight.shape)
    if shapes[0][1] != shapes[1][0] or (shapes[0][0], shapes[1][1]) != tuple(shapes[2]):
        return "its adapter does not have its shape"
    if len({call.weight.device for call in (base, adapter.up, adapter.down)}) > 1:
        return "it and its adapter are on different devices"
    if not _keeps_dtype(total, base, adapter):
        return "its adapter computes in another dtype, which the sum would have"
    reason = _why_inputs_differ(view, base, adapter)
    if reason is not None:
        return reason
    reasons = [view.why_shared(call) for call in (base, adapter.up, adapter.down)]
    return next((reason for reason in reasons if reason is not None), None)


def _why_inputs_differ(view: GraphView, base: Call, adapter: Adapter) -> str | None:
    """Why the layer and its adapter may not see the same values, or not in the same mode."""
    for node in adapter.nodes:
        if node.target in _PRODUCTS and not memory_roots(view.gm, *written_by(view.gm, node)) <= set(adapter.nodes):
            return f"{node.name} scales what its adapter reads in place"
    places = [view.position[node] for node in (base.node, *adapter.nodes)]
    span = view.nodes[min(places) : max(places) + 1]
    writer = writes_to(view.gm, base.input, [node for node in span if written_by(view.gm, node)])
    if writer is not None:
        return f"{writer.name} writes into its input between it and its adapter"
    switch = next(filter(switches_mode, span), None)
    return None if switch is None else f"{switch.name} switches gradients or autocast between it and its adapter"


def _keeps_dtype(total: Node, base: Call, adapter: Adapter) -> bool:
    """Whether what follows gets the layer's own dtype: the adapter has it, or the sum is cast to it at once."""
    assert adapter.up is not None
    if torch.promote_types(adapter.up.weight.dtype, base.weight.dtype) == base.weight.dtype:
        return True
    return all(user.target in _CASTS and base.weight.dtype in user.args for user in total.users) and bool(total.users)


class _Adapted(nn.Module):
    """The smallest model with an adapter: scaled, behind an idle dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.dropout = nn.Dropout(0.1)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x) + self.up(self.down(self.dropout(x))) * 2.0)
