"""Where a difference of one rounding becomes a whole step: operators that jump, behind others that mix no elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.modules import pooling

from refold.graph.aliasing import follow, has_tag
from refold.graph.targets import called_name, name_of, only_holds, runs_unknown_code
from refold.graph.values import example_value

_JUMPS = {
    *("floor", "ceil", "round", "trunc", "fix", "frac", "sign", "sgn", "signbit", "heaviside"),
    *("floordiv", "floor_divide", "__floordiv__", "mod", "remainder", "__mod__", "fmod", "divmod", "true_divmod"),
    *("frexp", "fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine", "quantize_per_tensor"),
    *("quantize_per_channel", "quantize_per_tensor_dynamic", "acos", "arccos", "asin", "arcsin", "acosh", "arccosh"),
    *("atanh", "arctanh", "erfinv", "logit", "isin", "count_nonzero", "any", "all", "is_nonzero"),
    *("eq", "ne", "lt", "le", "gt", "ge", "greater", "greater_equal", "less", "less_equal", "not_equal"),
    *("equal", "isclose", "allclose", "logical_and", "logical_or", "logical_xor", "logical_not", "nonzero"),
    *("argmax", "argmin", "sort", "argsort", "msort", "topk", "kthvalue", "median", "nanmedian", "mode", "unique"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
    *("bucketize", "searchsorted", "histc", "histogram", "digitize", "cummax", "cummin", "aminmax"),
    *(
        "int",
        "long",
        "short",
        "byte",
        "char",
        "bool",
        "item",
        "tolist",
        "hardshrink",
        "threshold",
        "_threshold",
        "bernoulli",
    ),
}
"""What is not continuous, or ends: the next number may have quite another result, or none."""

_SHAPES = {
    *("view", "reshape", "view_as", "reshape_as", "transpose", "permute", "t", "swapaxes", "movedim", "moveaxis"),
    *("expand", "expand_as", "squeeze", "unsqueeze", "flatten", "unflatten", "ravel", "contiguous", "clone", "detach"),
    *("slice", "select", "narrow", "getitem", "index", "index_select", "gather", "take", "chunk", "split", "unbind"),
    *("cat", "concat", "concatenate", "stack", "hstack", "vstack", "repeat", "repeat_interleave", "tile", "flip"),
    *("pad", "diagonal", "to", "type", "type_as", "float", "double", "half", "bfloat16", "alias", "lift_fresh_copy"),
    *("max", "min", "amax", "amin", "truediv", "tril", "triu", "roll", "interpolate", "upsample_nearest1d"),
    *("upsample_nearest2d", "upsample_nearest3d", "max_pool1d", "max_pool2d", "max_pool3d", "pixel_shuffle"),
    *("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "pixel_unshuffle", "dropout"),
}
"""What moves elements, or hands one of them on, and computes nothing with them."""

_ELEMENTWISE_HOMES = ("activation", "dropout", "flatten", "padding", "pixelshuffle", "channelshuffle")
"""Files of torch.nn whose layers work element by element or move elements."""
_HAND_ON = (nn.Identity, nn.Upsample, pooling._MaxPoolNd, pooling._AdaptiveMaxPoolNd)
_MIX = (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin, nn.MultiheadAttention)
_STEPS = (nn.Threshold, nn.Hardshrink)
_INTO = {"copy_", "setitem", "index_put_", "index_copy_", "scatter_", "masked_scatter_", "type_as", "to"}
"""What may cast to the type of another tensor."""
_INTEGERS = ("Int", "Long", "Short", "Byte", "Char", "Bool")


def jump_behind(gm: GraphModule, node: Node) -> Node | None:
    """The first node that jumps among those that read a value, directly or through element-wise and shape operators."""
    behind = list(follow([node], lambda value: value.users if value is node or _keeps_elements(gm, value) else ()))
    carried = {node, *behind}
    return next((reader for reader in behind if _jumps(gm, carried, reader)), None)


def _jumps(gm: GraphModule, carried: set[Node], reader: Node) -> bool:
    if reader.op == "call_module":
        module = gm.get_submodule(str(reader.target))
        return isinstance(module, _STEPS) or getattr(module, "return_indices", False) or runs_unknown_code(gm, reader)
    if reader.op == "output":
        return False
    name = called_name(reader)
    if _plain(name) in _JUMPS or (name in ("max", "min") and _gives_indices(reader)) or _rounds(name, carried, reader):
        return True
    if runs_unknown_code(gm, reader) and not only_holds(reader.target):
        return True
    made = example_value(reader)
    if made is not None:
        return not (made.is_floating_point() or made.is_complex())
    given = [*reader.args[1:], *reader.kwargs.values()]
    return any(map(_is_integer, given)) or (name in _INTO and any(isinstance(each, Node) for each in given))


def _plain(name: str) -> str:
    """The name of an operator without the underscore that says that it works in place."""
    return name if name.endswith("__") else name.removesuffix("_")


def _gives_indices(reader: Node) -> bool:
    """Whether a maximum is taken along an axis, which gives the places as well."""
    return "dim" in reader.kwargs or (len(reader.args) > 1 and not isinstance(reader.args[1], Node))


def _rounds(name: str, carried: set[Node], reader: Node) -> bool:
    """Whether settings make an operator jump: a division that rounds, a pool that gives places, the nearest pixel."""
    settings = [*reader.args, *reader.kwargs.values()]
    if _plain(name) in ("div", "divide"):
        return "floor" in settings or "trunc" in settings
    if "max_pool" in name:
        return "indices" in name or bool(reader.kwargs.get("return_indices")) or True in reader.args[6:]
    is_nearest = name.startswith("grid_sampl") and ("nearest" in settings or 1 in reader.args[2:3])
    return is_nearest and not carried.isdisjoint([*reader.args[1:2], reader.kwargs.get("grid")])


def _is_integer(dtype: Any) -> bool:
    """Whether an argument names a type without fractions, as in a cast."""
    if isinstance(dtype, str):
        return dtype.startswith("torch.") and dtype.split(".")[-1].startswith(_INTEGERS)
    return isinstance(dtype, torch.dtype) and not (dtype.is_floating_point or dtype.is_complex)


def _keeps_elements(gm: GraphModule, reader: Node) -> bool:
    if reader.op == "call_module":
        module = gm.get_submodule(str(reader.target))
        home = type(module).__module__.removeprefix("torch.nn.modules.")
        return isinstance(module, _HAND_ON) or (home in _ELEMENTWISE_HOMES and not isinstance(module, _MIX))
    name = name_of(reader)
    return _plain(name) in _SHAPES or has_tag(name, torch.Tag.pointwise) or has_tag(_plain(name), torch.Tag.pointwise)
