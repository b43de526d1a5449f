"""Activations that are written out in arithmetic, found from where they bend, and known by the values they give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from refold.aliasing import written_by
from refold.constants import run_node
from refold.match import GraphView, why_not_plain
from refold.purity import name_of

aten = torch.ops.aten
_ARITHMETIC = {"add", "sub", "rsub", "mul", "div", "true_divide", "truediv", "pow", "square", "neg", "softplus"}
_MODULES = (nn.Tanh, nn.Sigmoid, nn.ReLU6, nn.Hardsigmoid, nn.Softplus)
_MOST_STEPS = 8
_POINTS = torch.tensor(
    [i / 40 for i in range(-1200, 1201)] + [1e-8, -1e-8, 300, -300], dtype=torch.float64, device="cpu"
)
_ROUNDING = 1e-14  # of a dozen steps in float64


@dataclass(frozen=True)
class Activation:
    """A function of torch, the ATen operator for it, their settings, and by what it is bent: written with another bend,
    it would be rounded otherwise where it is nearly zero."""

    function: Callable[..., Any]
    operator: Any
    bends: frozenset[str]
    settings: dict[str, Any] = field(default_factory=dict)


_ACTIVATIONS = (
    Activation(F.gelu, aten.gelu.default, frozenset({"tanh"}), {"approximate": "tanh"}),
    Activation(F.gelu, aten.gelu.default, frozenset({"erf"})),
    Activation(F.silu, aten.silu.default, frozenset({"sigmoid", "exp"})),
    Activation(F.mish, aten.mish.default, frozenset({"tanh"})),
    Activation(F.hardswish, aten.hardswish.default, frozenset({"relu6", "hardtanh", "clamp", "hardsigmoid"})),
)
_BENDS = frozenset.union(*(activation.bends for activation in _ACTIVATIONS))


@dataclass(frozen=True)
class WrittenActivation:
    """What an activation reads, the steps it is written in, in the graph's order, and which it is."""

    source: Node
    steps: list[Node]
    activation: Activation

    @property
    def root(self) -> Node:
        """The last step, which gives the value."""
        return self.steps[-1]


def match_written_activation(view: GraphView, bend: Node) -> WrittenActivation | None:
    """The activation around its bend; None where the node is something else."""
    candidates = [activation for activation in _ACTIVATIONS if _name(view, bend) in activation.bends]
    if not candidates or not _is_step(view, bend):
        return None
    for root in reversed(_ahead(view, bend)):
        for source in _behind(view, bend):
            steps = _steps_between(view, source, root)
            values = _evaluate(view, source, steps) if steps else None
            if steps and values is not None:
                found = next((activation for activation in candidates if _is(activation, values)), None)
                if found is not None:
                    return WrittenActivation(source, steps, found)
    return None


def _is(activation: Activation, values: torch.Tensor) -> bool:
    difference = values - activation.function(_POINTS, **activation.settings)
    return bool((difference.abs() <= _ROUNDING * (1 + _POINTS.abs())).all())


def _ahead(view: GraphView, node: Node) -> list[Node]:
    """The steps behind one another that alone read each other, from a node on."""
    chain = [node]
    while len(chain) < _MOST_STEPS and len(chain[-1].users) == 1:
        (user,) = chain[-1].users
        if not _is_step(view, user):
            break
        chain.append(user)
    return chain


def _behind(view: GraphView, node: Node) -> list[Node]:
    """The values that a node may be computed from by steps alone, the nearest first."""
    found: dict[Node, None] = {}
    pending = list(node.all_input_nodes)
    while pending and len(found) < _MOST_STEPS:
        value = pending.pop(0)
        if value not in found:
            found[value] = None
            pending += value.all_input_nodes if _is_step(view, value) else []
    return list(found)


def _steps_between(view: GraphView, source: Node, root: Node) -> list[Node] | None:
    """The steps by which the root is computed from the source and from nothing else, in the graph's order."""
    steps: set[Node] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        if node is source or node in steps:
            continue
        if not _is_step(view, node) or len(steps) > 2 * _MOST_STEPS:
            return None
        steps.add(node)
        pending += node.all_input_nodes
    return sorted(steps, key=view.position.__getitem__)


def _is_step(view: GraphView, node: Node) -> bool:
    """Whether a node is elementwise arithmetic on values and numbers."""
    name = _name(view, node)
    if name not in _BENDS and name not in _ARITHMETIC:
        return False
    given = [*node.args, *node.kwargs.values()]
    are_plain = all(isinstance(value, Node | int | float) or value is None for value in given)
    return are_plain and not written_by(view.gm, node)


def _name(view: GraphView, node: Node) -> str:
    if node.op != "call_module":
        return name_of(node)
    module = view.module(str(node.target))
    is_known = isinstance(module, _MODULES) and why_not_plain(module, _MODULES) is None
    return type(module).__name__.lower() if is_known else ""


def _evaluate(view: GraphView, source: Node, steps: list[Node]) -> torch.Tensor | None:
    """What these steps make of numbers; None where they are not what they look like."""
    values: dict[Node, Any] = {source: _POINTS}
    try:
        for node in steps:
            values[node] = run_node(view.gm, node, values)
    except Exception:
        return None
    made = values[steps[-1]]
    return made if isinstance(made, torch.Tensor) and made.shape == _POINTS.shape else None
