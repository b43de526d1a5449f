"""Linear layers that apply ReLU or GELU themselves, in one kernel of cuBLAS.

A compiler calls a library for a matrix product and makes a kernel of its own for the activation behind it, so that the
widest value of a transformer is written, read and written again. The fused kernels know ReLU and GELU by tanh; the
exact GELU they do not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from refold.graph.arguments import argument
from refold.graph.layout import has_dtype
from refold.graph.targets import name_of
from refold.graph.values import example_value
from refold.graph.view import Call, GraphView
from refold.patterns.activations import DTYPES, activation_of
from refold.rewrite.operators import ADDMM, LINEAR
from refold.rewrite.refusal import attempt

_VIEWS = ("view", "reshape", "_unsafe_view")


@torch.library.custom_op(
    "refold::linear_activation",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor bias, bool gelu) -> Tensor",
)
def linear_activation(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, gelu: bool) -> torch.Tensor:
    """`relu(x·W + b)`, or GELU by tanh of that; the weight as (inputs, outputs)."""
    rows = x.reshape(-1, x.shape[-1])
    if x.is_cuda:
        y = torch._addmm_activation(bias, rows, weight, use_gelu=gelu)
    else:
        y = torch.addmm(bias, rows, weight)
        y = F.gelu(y, approximate="tanh") if gelu else y.relu()
    return y.view(*x.shape[:-1], weight.shape[1])


@linear_activation.register_fake
def _shape_of_linear_activation(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, gelu: bool) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[1])


@dataclass(frozen=True)
class _LinearWithActivation:
    """A linear layer, and the activation behind it or behind views of it."""

    linear: Call
    activation: Node
    gelu: bool


def fuse_linears(gm: GraphModule) -> int:
    """Put fused kernels into a graph wherever they can be used; how many there are."""
    view = GraphView(gm)
    sites = [site for node in view.nodes if (site := _match(view, node)) is not None]
    for site in sites:
        _fuse(gm, site)
    return len(sites)


def _match(view: GraphView, node: Node) -> _LinearWithActivation | None:
    kind = activation_of(view, node)
    value: Any = node.args[0] if kind is not None and node.args else None
    while isinstance(value, Node) and len(value.users) == 1 and name_of(value) in _VIEWS and not has_dtype(value):
        value = value.args[0]
    if not isinstance(value, Node) or len(value.users) != 1:
        return None
    linear = attempt(LINEAR.match, view, value) or attempt(ADDMM.match, view, value)
    if not isinstance(linear, Call) or view.mode_switches_between(value, node):
        return None
    read, weight = example_value(linear.input), linear.weight
    if read is None or read.dim() < 2 or read.dtype is not weight.dtype or read.dtype not in DTYPES:
        return None
    return _LinearWithActivation(linear, node, gelu=kind == "gelu")


def _fuse(gm: GraphModule, site: _LinearWithActivation) -> None:
    """The activation moves to the layer, before the views."""
    node, operands = site.linear.node, site.linear.operands
    is_turned = site.linear.out_axis == 0
    rows = argument(node, 0, "input") if is_turned else node.args[1]  # of now: the layer before may be fused already
    with gm.graph.inserting_before(node):
        weight = gm.graph.get_attr(operands["weight"].name)
        if is_turned:
            weight = gm.graph.call_method("t", (weight,))
        bias = gm.graph.get_attr(operands["bias"].name if "bias" in operands else _zeros(gm, site.linear))
        fused = gm.graph.call_function(torch.ops.refold.linear_activation.default, (rows, weight, bias, site.gelu))
    fused.meta = dict(node.meta)
    node.replace_all_uses_with(fused)
    gm.graph.erase_node(node)
    site.activation.replace_all_uses_with(site.activation.all_input_nodes[0])
    gm.graph.erase_node(site.activation)


def _zeros(gm: GraphModule, linear: Call) -> str:
    """The name of a new bias for a layer that has none."""
    name = f"{linear.node.name}_no_bias"
    gm.register_buffer(name, linear.weight.new_zeros(linear.weight.shape[0]), persistent=False)
    return name
