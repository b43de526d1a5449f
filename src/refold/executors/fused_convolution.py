"""Convolutions that add a residual and apply ReLU themselves, in one kernel of cuDNN.

A compiler calls a library for a convolution and makes a kernel of its own for what comes after it, so that an image is
written, read and written again. The fused kernels add in float32 and round once. They take no other activation, and not
every geometry: each convolution is tried before it is replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from refold.graph.aliasing import written_by
from refold.graph.targets import name_of
from refold.graph.values import example_value
from refold.graph.view import Call, GraphView
from refold.patterns.activations import DTYPES, activation_of
from refold.rewrite.operators import CONVOLUTION
from refold.rewrite.refusal import attempt

_Maybe = torch.Tensor | None
_Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@torch.library.custom_op(
    "refold::convolution_relu",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, "
    "SymInt[] stride, SymInt[] padding, SymInt[] dilation) -> Tensor",
)
def convolution_relu(
    x: torch.Tensor, weight: torch.Tensor, bias: _Maybe, residual: _Maybe, *geometry: Any
) -> torch.Tensor:
    """`relu(conv(x) + bias + residual)`, channels last."""
    x, weight = _channels_last(x), _channels_last(weight)
    if not x.is_cuda:
        y = F.conv2d(x, weight, bias, *geometry)
        return _channels_last((y if residual is None else y + residual).relu())
    stride, padding, dilation = geometry
    if residual is None:
        return torch.cudnn_convolution_relu(x, weight, bias, stride, padding, dilation, 1)
    return torch.cudnn_convolution_add_relu(x, weight, residual, 1, bias, stride, padding, dilation, 1)


@convolution_relu.register_fake
def _shape_of_convolution_relu(
    x: torch.Tensor, weight: torch.Tensor, bias: _Maybe, residual: _Maybe, *geometry: Any
) -> torch.Tensor:
    y = F.conv2d(x, weight, bias, *geometry)
    return torch.empty_like(y, memory_format=torch.channels_last)


def _channels_last(image: torch.Tensor) -> torch.Tensor:
    return image.contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class _ConvolutionWithRelu:
    """A convolution, the addition behind it if there is one, and the ReLU behind that."""

    conv: Call
    geometry: _Geometry
    add: Node | None
    residual: Node | None
    relu: Node


def fuse_convolutions(gm: GraphModule) -> int:
    """Put fused kernels into a graph wherever they can be used; how many there are."""
    view = GraphView(gm)
    sites = [site for node in view.nodes if (site := _match(view, node)) is not None and _can_run(site)]
    fused: dict[Node, Node] = {}
    for site in sites:
        fused[site.relu] = _fuse(gm, site, fused)
    return len(sites)


def _match(view: GraphView, relu: Node) -> _ConvolutionWithRelu | None:
    value = _rectified(view, relu)
    if value is None or len(value.users) > 1:
        return None
    add, residual, image = None, None, value
    if name_of(value) in ("add", "add_", "iadd"):
        operands = _added(view, value)
        if operands is None:
            return None
        add, (image, residual) = value, operands
    conv = attempt(CONVOLUTION.match, view, image, 2)
    if not isinstance(conv, Call):
        return None
    geometry = _plain_geometry(conv)
    inside = {image, add, relu}
    others = [node for node in view.writers_between(image, relu) if node not in inside]
    if geometry is None or others or view.mode_switches_between(image, relu):
        return None
    return _ConvolutionWithRelu(conv, geometry, add, residual, relu)


def _rectified(view: GraphView, node: Node) -> Node | None:
    """What a ReLU reads."""
    value = node.args[0] if activation_of(view, node) == "relu" and node.args else None
    return value if isinstance(value, Node) else None


def _added(view: GraphView, add: Node) -> tuple[Node, Node] | None:
    """A convolution without another reader, and the image of the same size that is added to it."""
    if len(add.args) != 2 or add.kwargs not in ({}, {"alpha": 1}) or add.args[0] is add.args[1]:
        return None
    a: Any
    b: Any
    a, b = add.args
    for image, other in ((a, b),) if written_by(view.gm, add) else ((a, b), (b, a)):
        sizes = [(value.shape, value.dtype) for value in map(example_value, (image, other)) if value is not None]
        if len(sizes) < 2 or sizes[0] != sizes[1] or len(image.users) > 1:
            continue
        if isinstance(attempt(CONVOLUTION.match, view, image, 2), Call):
            return image, other
    return None


def _plain_geometry(conv: Call) -> _Geometry | None:
    """Stride, padding and dilation of a convolution of a batch, without groups and with zeros around."""
    read = example_value(conv.input)
    if read is None or read.dim() != 4 or read.dtype is not conv.weight.dtype or read.dtype not in DTYPES:
        return None
    if conv.settings["groups"] != 1 or conv.settings["padding_mode"] != "zeros":
        return None
    stride, padding, dilation = (conv.settings[key] for key in ("stride", "padding", "dilation"))
    sizes = (*stride, *padding, *dilation, *read.shape)
    return (stride, padding, dilation) if all(type(size) is int for size in sizes) else None


def _can_run(site: _ConvolutionWithRelu) -> bool:
    """Whether there is a kernel for it."""
    device = site.conv.weight.device
    if device.type == "cuda" and not torch.backends.cudnn.enabled:
        return False
    tensors = [
        None if value is None else torch.zeros(value.shape, dtype=value.dtype, device=device)
        for value in (example_value(site.conv.input), example_value(site.residual))
    ]
    try:
        convolution_relu(tensors[0], site.conv.weight, site.conv.bias, tensors[1], *site.geometry)
    except RuntimeError:
        return False
    return True


def _fuse(gm: GraphModule, site: _ConvolutionWithRelu, fused: dict[Node, Node]) -> Node:
    """Put one call in place of the site; `fused` says what other sites became."""
    operands = site.conv.operands
    image, residual = (fused.get(value, value) if value else None for value in (site.conv.input, site.residual))
    with gm.graph.inserting_before(site.relu):
        tensors = [gm.graph.get_attr(operands[key].name) if key in operands else None for key in ("weight", "bias")]
        made = gm.graph.call_function(
            torch.ops.refold.convolution_relu.default, (image, *tensors, residual, *site.geometry)
        )
    made.meta = dict(site.relu.meta)
    site.relu.replace_all_uses_with(made)
    for node in (site.relu, site.add, site.conv.node):
        if node is not None:
            gm.graph.erase_node(node)
    return made
