"""Activations: those decomposed into arithmetic, found by their nonlinearity and known by their values, and calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from refold.graph.aliasing import follow, written_by
from refold.graph.arguments import argument
from refold.graph.constants import run_node
from refold.graph.targets import name_of
from refold.graph.view import GraphView
from refold.rewrite.refusal import holds, plain

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
    """A function of torch, the ATen operator for it, their settings, and the nonlinearities that it is decomposed into:
    with another one it would be rounded otherwise where it is nearly zero."""

    function: Callable[..., Any]
    operator: Any
    nonlinearities: frozenset[str]
    settings: dict[str, Any] = field(default_factory=dict)


_ACTIVATIONS = (
    Activation(F.gelu, aten.gelu.default, frozenset({"tanh"}), {"approximate": "tanh"}),
    Activation(F.gelu, aten.gelu.default, frozenset({"erf"})),
    Activation(F.silu, aten.silu.default, frozenset({"sigmoid", "exp"})),
    Activation(F.mish, aten.mish.default, frozenset({"tanh"})),
    Activation(F.hardswish, aten.hardswish.default, frozenset({"relu6", "hardtanh", "clamp", "hardsigmoid"})),
)
_NONLINEARITIES = frozenset.union(*(activation.nonlinearities for activation in _ACTIVATIONS))


@dataclass(frozen=True)
class DecomposedActivation:
    """What an activation reads, the steps it is decomposed into, in the graph's order, and which it is."""

    source: Node
    steps: list[Node]
    activation: Activation

    @property
    def root(self) -> Node:
        """The last step, which gives the value."""
        return self.steps[-1]


def match_decomposed_activation(view: GraphView, nonlinearity: Node) -> DecomposedActivation | None:
    """The activation around its nonlinearity; None where the node is something else."""
    candidates = [activation for activation in _ACTIVATIONS if _name(view, nonlinearity) in activation.nonlinearities]
    if not candidates or not _is_step(view, nonlinearity):
        return None
    for root in reversed(_ahead(view, nonlinearity)):
        for source in _behind(view, nonlinearity):
            steps = _steps_between(view, source, root)
            values = _evaluate(view, source, steps) if steps else None
            if steps and values is not None:
                found = next((activation for activation in candidates if _agrees(activation, values)), None)
                if found is not None:
                    return DecomposedActivation(source, steps, found)
    return None


def _agrees(activation: Activation, values: torch.Tensor) -> bool:
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
    behind = follow([root], lambda node: node.all_input_nodes if node is not source and _is_step(view, node) else ())
    steps = [node for node in dict.fromkeys([root, *islice(behind, 2 * _MOST_STEPS + 2)]) if node is not source]
    if len(steps) > 2 * _MOST_STEPS + 1 or not all(_is_step(view, node) for node in steps):
        return None
    return sorted(steps, key=view.position.__getitem__)


def _is_step(view: GraphView, node: Node) -> bool:
    """Whether a node is elementwise arithmetic on values and numbers."""
    name = _name(view, node)
    if name not in _NONLINEARITIES and name not in _ARITHMETIC:
        return False
    given = [*node.args, *node.kwargs.values()]
    are_plain = all(isinstance(value, Node | int | float) or value is None for value in given)
    return are_plain and not written_by(view.gm, node)


def _name(view: GraphView, node: Node) -> str:
    if node.op != "call_module":
        return name_of(node)
    module = view.module(str(node.target))
    is_known = isinstance(module, _MODULES) and holds(plain, module, _MODULES)
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


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes in which fused kernels apply activations."""


def activation_of(view: GraphView, node: Node) -> Literal["relu", "gelu"] | None:
    """Whether a node applies ReLU, or GELU by tanh."""
    if node.op == "call_module":
        module: Any = view.module(str(node.target))
        if not isinstance(module, nn.ReLU | nn.GELU) or not holds(plain, module, (nn.ReLU, nn.GELU)):
            return None
        return "relu" if isinstance(module, nn.ReLU) else "gelu" if module.approximate == "tanh" else None
    name = name_of(node)
    if name == "gelu":
        return "gelu" if argument(node, 1, "approximate", "none") == "tanh" else None
    return "relu" if name in ("relu", "relu_") else None
