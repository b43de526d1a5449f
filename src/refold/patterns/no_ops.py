"""Which calls give back their input: nothing is computed, or two calls cancel. Each rule is exact to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from refold import fx_private
from refold.graph.arguments import argument, axis_order
from refold.graph.layout import makes_contiguous
from refold.graph.purity import drops_nothing
from refold.graph.targets import called_name, name_of
from refold.graph.values import example_value, proves_shapes, rank_of, same_sizes
from refold.graph.view import GraphView
from refold.patterns.rule_table import RuleTable
from refold.rewrite.refusal import Refuse

aten = torch.ops.aten
_END = 1 << 60
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class NoOp:
    """A call that gives back a value that is there already: why, how many calls back, whether it made a copy, and
    whether it handed on its very input, not a view."""

    why: str
    back: int = 1
    copies: bool = False
    same: bool = False


_RULES: RuleTable[Callable[[GraphView, Node], NoOp | None]] = RuleTable()


def match_no_op(view: GraphView, node: Node) -> NoOp | None:
    """What makes a node a no-op, if it is one; refuses one that only looks like it."""
    if not node.args or not isinstance(node.args[0], Node):
        return None
    if node.op == "call_module":
        return _module(view, node)
    if node.op not in ("call_function", "call_method"):
        return None
    apply = _RULES.of(node)
    return apply(view, node) if apply is not None and "out" not in node.kwargs else None


def source_of(node: Node, back: int) -> Node | None:
    """The value that lies some calls back, always through the first argument."""
    current: Any = node
    for _ in range(back):
        current = current.args[0] if isinstance(current, Node) and current.args else None
    return current if isinstance(current, Node) else None


# --- modules and dropout -----------------------------------------------------------------------------------------


def _module(view: GraphView, node: Node) -> NoOp | None:
    module = view.module(str(node.target))
    if type(module) is not nn.Identity and type(module) not in _DROPOUTS:
        return None
    assert module is not None
    if fx_private.has_hooks(module) or "forward" in module.__dict__ or len(node.args) + len(node.kwargs) != 1:
        raise Refuse("its module is hooked or called in another way")
    if type(module) is nn.Identity:
        return NoOp("an identity", same=True)
    if module.training and module.p != 0:
        raise Refuse("it drops values at random: its module is in training mode")
    return NoOp("a dropout that drops nothing", same=True)


@_RULES("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
def _dropout(view: GraphView, node: Node) -> NoOp | None:
    if not drops_nothing(node):
        raise Refuse("it drops values at random")
    return NoOp("a dropout that drops nothing", same=True)


# --- copies and casts --------------------------------------------------------------------------------------------


@_RULES("alias", "lift_fresh")
def _alias(view: GraphView, node: Node) -> NoOp | None:
    return NoOp("another name of the same value")


@_RULES("clone", "lift_fresh_copy")
def _clone(view: GraphView, node: Node) -> NoOp | None:
    if node.kwargs.get("memory_format", torch.preserve_format) is not torch.preserve_format:
        raise Refuse("it may change the memory layout")
    return NoOp("a copy that nobody needs", copies=True)


@_RULES("contiguous")
def _contiguous(view: GraphView, node: Node) -> NoOp | None:
    if len(node.args) + len(node.kwargs) != 1:
        return None
    return NoOp("its input is contiguous already", same=True) if _surely_contiguous(view, node.args[0]) else None


_KEEPS_CONTIGUOUS = {"view", "reshape", "flatten", "unsqueeze", "alias", "dropout"}


def _surely_contiguous(view: GraphView, value: Any) -> bool:
    """Whether the operator that made a value says that it is contiguous; recorded strides are those of one run."""
    while isinstance(value, Node) and value.op != "call_module" and name_of(value) in _KEEPS_CONTIGUOUS:
        value = value.args[0] if value.args else None
    return isinstance(value, Node) and makes_contiguous(view.gm, value)


_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
_CASTS |= {"int": torch.int32, "long": torch.int64, "bool": torch.bool}


@_RULES("to", "_to_copy", "type", "type_as", *_CASTS)
def _cast(view: GraphView, node: Node) -> NoOp | None:
    if node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload):
        return None  # a function of Python that happens to have this name
    before, after = example_value(node.args[0]), example_value(node)
    if before is None or after is None:
        raise Refuse("the dtype of its input is not recorded")
    if before.dtype != after.dtype or before.device != after.device:
        return None
    given = [*node.args[1:], *node.kwargs.values()]
    if any(isinstance(a, torch.memory_format) and a is not torch.preserve_format for a in given):
        return None
    check_recorded_dtypes(view)
    flags = [a for a in node.args[1:] if isinstance(a, bool)]  # non_blocking, copy
    copies = name_of(node) == "_to_copy" or node.kwargs.get("copy", False) is not False or flags[1:2] == [True]
    dtype = str(after.dtype).removeprefix("torch.")
    return NoOp(f"a cast to the dtype it has ({dtype})", copies=copies, same=not copies)


def check_recorded_dtypes(view: GraphView) -> None:
    """Refuse where capture recorded other dtypes than the module's tensors have now."""
    if not view.recorded_dtypes_hold:
        raise Refuse("the dtypes that capture recorded no longer hold: the module was cast since")


# --- shapes ------------------------------------------------------------------------------------------------------


@_RULES("view", "reshape", "expand", "_unsafe_view", "flatten", "unflatten", "expand_as", "view_as", "reshape_as")
def _same_shape(view: GraphView, node: Node) -> NoOp | None:
    before, after = example_value(node.args[0]), example_value(node)
    if before is None or after is None or not (proves_shapes(before) and proves_shapes(after)):
        return None
    if before.dtype != after.dtype or not same_sizes(before.shape, after.shape):
        return _undone(node, after)
    return NoOp("its input has this shape already")


def _undone(node: Node, after: torch.Tensor) -> NoOp | None:
    """A reshape of a reshape, back to the shape it had."""
    names = {"view", "reshape", "flatten", "unflatten", "_unsafe_view", "view_as", "reshape_as", "unsqueeze"}
    origin = example_value(source_of(node, 2))
    if origin is None or not names.issuperset((name_of(node), name_of(node.args[0]))):  # type: ignore[arg-type]
        return None
    if not proves_shapes(origin) or origin.dtype != after.dtype:
        return None
    same = same_sizes(origin.shape, after.shape)
    return NoOp("it takes the reshape before it back", back=2, copies=True) if same else None


@_RULES("slice")
def _slice(view: GraphView, node: Node) -> NoOp | None:
    start, end, step = argument(node, 2, "start"), argument(node, 3, "end"), argument(node, 4, "step", 1)
    whole = end is None or (isinstance(end, int) and end > _END)
    is_op = isinstance(node.target, torch._ops.OpOverload)
    return NoOp("it takes all of an axis") if is_op and start in (None, 0) and whole and step == 1 else None


@_RULES("transpose", "swapaxes", "swapdims", "t", "permute")
def _transpose(view: GraphView, node: Node) -> NoOp | None:
    order = _order(node)
    if order is None:
        return None
    if order == list(range(len(order))):
        return NoOp("it leaves the axes in their order")
    inner_order = _order(node.args[0])  # type: ignore[arg-type]
    if inner_order is None or len(inner_order) != len(order) or source_of(node, 2) is None:
        return None
    back = [inner_order[axis] for axis in order] == list(range(len(order)))
    return NoOp("it takes the transpose before it back", back=2) if back else None


def _order(node: Node) -> list[int] | None:
    return axis_order(called_name(node), node, rank_of(node))


_PADS = frozenset({F.pad, torch.constant_pad_nd, aten.pad.default, aten.constant_pad_nd.default})


@_RULES("pad", "constant_pad_nd")
def _pad(view: GraphView, node: Node) -> NoOp | None:
    amounts = argument(node, 1, "pad")
    if node.target not in _PADS or not isinstance(amounts, list | tuple):
        return None
    return NoOp("it pads nothing", copies=True) if all(type(a) is int and a == 0 for a in amounts) else None


# --- arithmetic --------------------------------------------------------------------------------------------------

_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1, "truediv": 1, "true_divide": 1}


@_RULES(*_NEUTRAL)
def _neutral(view: GraphView, node: Node) -> NoOp | None:
    other = node.args[1] if len(node.args) == 2 else None
    name = name_of(node)
    if isinstance(other, bool) or not isinstance(other, int | float) or other != _NEUTRAL[name] or node.kwargs:
        return None
    before, after = example_value(node.args[0]), example_value(node)
    if before is None or after is None or before.dtype != after.dtype:
        return None
    negative = str(other).startswith("-")
    if after.is_floating_point() and name in ("add", "sub") and negative != (name == "add"):
        raise Refuse(f"{'-0.0 + 0' if name == 'add' else '-0.0 - -0.0'} is 0.0, so it changes a bit")
    check_recorded_dtypes(view)
    return NoOp(f"{name} with {other}", copies=True)


@_RULES("neg", "negative", "bitwise_not", "invert")
def _negation(view: GraphView, node: Node) -> NoOp | None:
    inner = node.args[0]
    twice = isinstance(inner, Node) and inner.target == node.target and inner.op == node.op
    return NoOp("a double negation", back=2, copies=True) if twice and len(node.args) == 1 else None
