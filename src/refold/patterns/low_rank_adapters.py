"""A low-rank adapter next to a linear layer, followed from the sum of both back to their input."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from refold.graph.view import Call, GraphView
from refold.rewrite.operators import DROPOUT, LINEAR
from refold.rewrite.refusal import Refuse, attempt, plain

aten = torch.ops.aten

CASTS: set[Any] = {aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, "to", "float", "type_as"}
PRODUCTS: set[Any] = {operator.mul, operator.imul, torch.mul, aten.mul.Tensor, aten.mul.Scalar, "mul", "mul_"}
_SUMS: set[Any] = {operator.add, operator.iadd, torch.add, aten.add.Tensor, aten.add_.Tensor, "add", "add_", "__add__"}


@dataclass(frozen=True)
class Adapter:
    """`c·(x·Aᵀ)·Bᵀ`: the layer down (A), the layer up (B), the scaling c, and all nodes from the sum to the input."""

    down: Call
    up: Call
    scaling: float
    nodes: tuple[Node, ...]


def match_adapted(view: GraphView, node: Node) -> tuple[Call, Adapter] | None:
    """The linear layer and the adapter whose outputs a node adds; None where it is something else."""
    terms = _terms(node)
    for layer, other in (terms, terms[::-1]) if terms else ():
        base = attempt(LINEAR.match, view, layer)
        if base is None:
            continue
        source = base.input if isinstance(base, Call) else next(iter(layer.all_input_nodes), None)
        adapter = _follow(view, other, source)
        if adapter is None:
            continue
        if isinstance(base, Refuse):
            raise base
        return base, adapter
    return None


def _terms(node: Node) -> list[Any] | None:
    if node.op not in ("call_function", "call_method") or node.target not in _SUMS:
        return None
    values = [*node.args, *(value for name, value in node.kwargs.items() if name != "alpha")]
    if len(values) != 2 or not all(isinstance(value, Node) for value in values) or node.kwargs.get("alpha", 1) != 1:
        return None
    return values


def _follow(view: GraphView, node: Node, source: Node | None) -> Adapter | None:
    """Go up from a sum's term to the layer's input: scalings, casts and idle dropouts, and two thin linear layers."""
    nodes: list[Node] = []
    linears: list[Call | Refuse] = []
    refusals: list[Refuse] = []  # they count only where all the rest is an adapter
    scaling = 1.0
    while node is not source:
        nodes.append(node)
        linear = attempt(LINEAR.match, view, node)
        step = attempt(_factor, view, node) if linear is None else linear
        if step is None:
            return None
        if linear is not None:
            linears.append(linear)
        if isinstance(step, Refuse):
            refusals.append(Refuse(f"its adapter's {node.name} is left alone: {step.reason}"))
        elif isinstance(step, float):
            scaling *= step
        node = node.all_input_nodes[0]
    if len(linears) != 2:
        return None
    if refusals:
        raise refusals[0]
    up, down = (call for call in linears if isinstance(call, Call))
    return Adapter(down, up, scaling, tuple(nodes))


def _factor(view: GraphView, node: Node) -> float | None:
    """By what a node multiplies its one input, 1 if it casts or does nothing; None if it does something else."""
    if len(node.all_input_nodes) != 1:
        return None
    if node.target in CASTS:
        return 1.0
    if node.target in PRODUCTS:
        numbers: list[Any] = [value for value in (*node.args, *node.kwargs.values()) if not isinstance(value, Node)]
        return float(numbers[0]) if len(numbers) == 1 and type(numbers[0]) in (int, float) else None
    module = view.module(str(node.target)) if node.op == "call_module" else None
    if isinstance(module, nn.Identity):
        plain(module, (nn.Identity,))
        return 1.0
    dropout = DROPOUT.match(view, node)
    if dropout is None:
        return None
    if dropout.settings["training"] is not False and dropout.settings["p"] != 0:
        raise Refuse("it is active; call eval() first")
    return 1.0
