"""Where a difference of one rounding becomes a whole step: operators that jump, behind others that mix no elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from refold.graph.aliasing import follow, has_tag
from refold.graph.targets import called_name, name_of
from refold.graph.values import example_value

_JUMPS = {
    *("floor", "ceil", "round", "trunc", "fix", "frac", "sign", "sgn", "signbit", "heaviside"),
    *("floordiv", "floor_divide", "__floordiv__", "mod", "remainder", "__mod__", "fmod", "divmod", "true_divmod"),
    *("eq", "ne", "lt", "le", "gt", "ge", "greater", "greater_equal", "less", "less_equal", "not_equal"),
    *("equal", "isclose", "allclose", "logical_and", "logical_or", "logical_xor", "logical_not", "nonzero"),
    *("argmax", "argmin", "sort", "argsort", "msort", "topk", "kthvalue", "median", "nanmedian", "mode", "unique"),
    *("bucketize", "searchsorted", "histc", "histogram", "digitize", "cummax", "cummin", "aminmax"),
    *("int", "long", "short", "byte", "char", "bool", "item", "tolist", "hardshrink", "threshold", "bernoulli"),
}
"""What is not continuous: the next number may have quite another result."""

_SHAPES = {
    *("view", "reshape", "view_as", "reshape_as", "transpose", "permute", "t", "swapaxes", "movedim", "moveaxis"),
    *("expand", "expand_as", "squeeze", "unsqueeze", "flatten", "unflatten", "ravel", "contiguous", "clone", "detach"),
    *("slice", "select", "narrow", "getitem", "index", "index_select", "gather", "take", "chunk", "split", "unbind"),
    *("cat", "concat", "concatenate", "stack", "hstack", "vstack", "repeat", "repeat_interleave", "tile", "flip"),
    *("pad", "diagonal", "to", "type", "type_as", "float", "double", "half", "bfloat16", "alias", "lift_fresh_copy"),
    *("max", "min", "amax", "amin", "truediv", "tril", "triu", "roll"),
}
"""What moves elements, or hands one of them on, and computes nothing with them."""

_MODULES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.ReLU, nn.LeakyReLU, nn.Hardtanh, nn.PixelShuffle)


def jump_behind(gm: GraphModule, node: Node) -> Node | None:
    """The first node that jumps among those that read a value, directly or through element-wise and shape operators."""
    behind = follow([node], lambda value: value.users if value is node or _keeps_elements(gm, value) else ())
    return next(filter(_jumps, behind), None)


def _jumps(reader: Node) -> bool:
    name = called_name(reader)
    if not name:
        return False
    if name in _JUMPS or (name in ("max", "min") and _gives_indices(reader)):
        return True
    made = example_value(reader)
    if made is not None:
        return not (made.is_floating_point() or made.is_complex())
    return any(_is_integer(given) for given in (*reader.args[1:], *reader.kwargs.values()))


def _gives_indices(reader: Node) -> bool:
    """Whether a maximum is taken along an axis, which gives the places as well."""
    return "dim" in reader.kwargs or (len(reader.args) > 1 and not isinstance(reader.args[1], Node))


def _is_integer(dtype: Any) -> bool:
    """Whether an argument names a dtype without fractions, as in a cast."""
    return isinstance(dtype, torch.dtype) and not (dtype.is_floating_point or dtype.is_complex)


def _keeps_elements(gm: GraphModule, reader: Node) -> bool:
    if reader.op == "call_module":
        return isinstance(gm.get_submodule(str(reader.target)), _MODULES)
    name = name_of(reader)
    return name in _SHAPES or has_tag(name, torch.Tag.pointwise)
