"""A convolution behind nearest upsampling as a transposed convolution: which are one, by how much and how padded."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from refold.graph.arguments import per_axis
from refold.graph.values import example_value, proves_shapes, rank_of, same_size
from refold.graph.view import Call
from refold.rewrite.operators import TRANSPOSED_CONVOLUTION
from refold.rewrite.refusal import Refuse
from refold.weights.sharded import largest

EXACT = (1, 2, 4, 8)
"""torch finds the pixel that it repeats by a rounded product with 1/s, which is exact for powers of two."""
_ON_CPU = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def as_transposed(up: Call, conv: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The stride and the padding of the transposed convolution that does the work of both."""
    scales, padding, kernel = _scales(up, conv.dims), _padding(conv), conv.weight.shape[2:]
    if math.prod(k + s - 1 for k, s in zip(kernel, scales, strict=True)) >= math.prod(kernel) * math.prod(scales):
        raise Refuse("its kernel is so small that no products are saved")
    return scales, padding


def _scales(up: Call, dims: int) -> tuple[int, ...]:
    """How often values are repeated along each axis of space, where that is known for every run."""
    settings = up.settings
    if settings["mode"] not in ("nearest", "nearest-exact"):
        raise Refuse(f"the upsampling before it is {settings['mode']}, which repeats no values")
    factors = settings["scale_factor"]
    if factors is None:
        return _proven_scales(up, dims)
    if isinstance(factors, int | float) and up.dims != dims and rank_of(up.input) != dims + 2:
        raise Refuse("the rank of what is upsampled is not known, so neither are the axes")
    scales = per_axis(factors, dims)
    if not isinstance(scales, tuple | list) or len(scales) != dims:
        raise Refuse("the upsampling before it runs over other axes")
    if not all(isinstance(scale, int | float) for scale in scales):
        raise Refuse("by how much the upsampling before it enlarges is computed")
    if not all(scale in EXACT for scale in scales):
        raise Refuse(f"the upsampling before it enlarges by {tuple(scales)}; it must be 2, 4 or 8 (or 1 along an axis)")
    return tuple(int(scale) for scale in scales)


def _proven_scales(up: Call, dims: int) -> tuple[int, ...]:
    """The same from the sizes that capture recorded, where they hold in every run."""
    small, large = example_value(up.input), example_value(up.node)
    if small is None or large is None or not proves_shapes(large) or small.dim() != dims + 2:
        raise Refuse("the upsampling before it is given a size, and how often values are repeated is not proven")
    scales = []
    for before, after in zip(small.shape[2:], large.shape[2:], strict=True):
        scale = next((s for s in EXACT if same_size(before * s, after)), None)
        if scale is None:
            raise Refuse(
                f"the upsampling before it makes {after} of {before} values, not surely 2, 4 or 8 times as many"
            )
        scales.append(scale)
    return tuple(scales)


def _padding(conv: Call) -> tuple[int, ...]:
    """The padding of the transposed convolution."""
    settings, kernel = conv.settings, conv.weight.shape[2:]
    if settings["padding_mode"] != "zeros":
        raise Refuse("it pads with something else than zeros")
    if settings["groups"] != 1:
        raise Refuse("it is grouped")
    if any(size != 1 for key in ("stride", "dilation") for size in settings[key]):
        raise Refuse("it has a stride or a dilation")
    padding = settings["padding"]
    if isinstance(padding, str):
        if padding == "same" and any(size % 2 == 0 for size in kernel):
            raise Refuse("it pads more on one side than on the other")
        padding = tuple(size // 2 if padding == "same" else 0 for size in kernel)
    if not all(isinstance(size, int) and 0 <= size < taps for size, taps in zip(padding, kernel, strict=True)):
        raise Refuse("it pads by as much as its kernel is wide or more, or by what is computed")
    return tuple(taps - 1 - size for size, taps in zip(padding, kernel, strict=True))


def check_precision(weight: torch.Tensor) -> None:
    """Refuse where sums or products would be less precise than before."""
    short = _ON_CPU.get(weight.dtype)
    if short and weight.device.type == "cpu" and not getattr(torch.ops.mkldnn, f"_is_mkldnn_{short}_supported")():
        raise Refuse(f"on this CPU transposed convolutions add up numbers that were rounded to {weight.dtype}")
    limit = torch.finfo(weight.dtype).max
    most = largest(weight) if not weight.is_meta and weight.numel() else 0.0
    if math.isfinite(most):
        taps = math.prod(weight.shape[2:])
        if not most * taps <= limit:
            raise Refuse(f"sums of its taps may not be finite in {weight.dtype}")


def transposed_module(old: nn.Module, conv: Call, weight: torch.Tensor, settings: dict[str, Any]) -> nn.Module:
    """The module of the transposed convolution, with the bias of the old one."""
    inputs, outputs, *kernel = weight.shape
    kind: Any = next(kind for kind, dims in TRANSPOSED_CONVOLUTION.modules.items() if dims == conv.dims)
    new = kind(inputs, outputs, kernel, bias=False, device="meta", **settings).train(old.training)
    new.weight, new.bias = nn.Parameter(weight, requires_grad=conv.weight.requires_grad), conv.bias
    return new


def transposed_function(conv: Call) -> Any:
    """The function or ATen operator of the transposed convolution, whichever the convolution is."""
    found = (f for f, (_, dims) in TRANSPOSED_CONVOLUTION.functions.items() if dims == conv.dims)
    return next(f for f in found if isinstance(f, torch._ops.OpOverload) == (conv.kind == "aten"))
