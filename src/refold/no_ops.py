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
from refold.attention import same_sizes
from refold.layout import makes_contiguous
from refold.match import GraphView, example_value, proves_shapes, rank_of
from refold.purity import drops_nothing, name_of

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


Rule = Callable[[GraphView, Node], NoOp | str | None]
_RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a rule for calls of these names."""

    def enter(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return enter


def match_no_op(view: GraphView, node: Node) -> NoOp | str | None:
    """What makes a node a no-op, why one that looks like it is none, or None."""
    if not node.args or not isinstance(node.args[0], Node):
        return None
    if node.op == "call_module":
        return _module(view, node)
    if node.op not in ("call_function", "call_method"):
        return None
    apply = _RULES.get(name_of(node))
    return apply(view, node) if apply is not None and "out" not in node.kwargs else None


def source_of(node: Node, back: int) -> Node | None:
    """The value that lies some calls back, always through the first argument."""
    current: Any = node
    for _ in range(back):
        current = current.args[0] if isinstance(current, Node) and current.args else None
    return current if isinstance(current, Node) else None


# --- modules and dropout -----------------------------------------------------------------------------------------


def _module(view: GraphView, node: Node) -> NoOp | str | None:
    module = view.module(str(node.target))
    if type(module) is not nn.Identity and type(module) not in _DROPOUTS:
        return None
    assert module is not None
    if fx_private.has_hooks(module) or "forward" in module.__dict__ or len(node.args) + len(node.kwargs) != 1:
        return "its module is hooked or called in another way"
    if type(module) is nn.Identity:
        return NoOp("an identity", same=True)
    if module.training and module.p != 0:
        return "it drops values at random: its module is in training mode"
    return NoOp("a dropout that drops nothing", same=True)


@rule("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
def _dropout(view: GraphView, node: Node) -> NoOp | str | None:
    return NoOp("a dropout that drops nothing", same=True) if drops_nothing(node) else "it drops values at random"


# --- copies and casts --------------------------------------------------------------------------------------------


@rule("alias", "lift_fresh")
def _alias(view: GraphView, node: Node) -> NoOp | str | None:
    return NoOp("another name of the same value")


@rule("clone", "lift_fresh_copy")
def _clone(view: GraphView, node: Node) -> NoOp | str | None:
    if node.kwargs.get("memory_format", torch.preserve_format) is not torch.preserve_format:
        return "it may change the memory layout"
    return NoOp("a copy that nobody needs", copies=True)


@rule("contiguous")
def _contiguous(view: GraphView, node: Node) -> NoOp | str | None:
    if len(node.args) + len(node.kwargs) != 1:
        return None
    return NoOp("its input is contiguous already", same=True) if _surely_contiguous(view, node.args[0]) else None


_KEEPS_CONTIGUOUS = {"view", "reshape", "flatten", "unsqueeze", "alias", "dropout"}


def _surely_contiguous(view: GraphView, value: Any) -> bool:
    """Whether the operator that made a value says that it is contiguous; noted strides are those of one run."""
    while isinstance(value, Node) and value.op != "call_module" and name_of(value) in _KEEPS_CONTIGUOUS:
        value = value.args[0] if value.args else None
    return isinstance(value, Node) and makes_contiguous(view.gm, value)


_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}
_CASTS |= {"int": torch.int32, "long": torch.int64, "bool": torch.bool}


@rule("to", "_to_copy", "type", "type_as", *_CASTS)
def _cast(view: GraphView, node: Node) -> NoOp | str | None:
    if node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload):
        return None  # a function of Python that happens to have this name
    before, after = example_value(node.args[0]), example_value(node)
    if before is None or after is None:
        return "the dtype of its input is not noted"
    if before.dtype != after.dtype or before.device != after.device:
        return None
    given = [*node.args[1:], *node.kwargs.values()]
    if any(isinstance(a, torch.memory_format) and a is not torch.preserve_format for a in given):
        return None
    if not noted_dtypes_hold(view):
        return "the dtypes that capture noted no longer hold: the module was cast since"
    copies = name_of(node) == "_to_copy" or node.kwargs.get("copy", False) is not False or _positional_copy(node)
    return NoOp(
        f"a cast to the dtype it has ({str(after.dtype).removeprefix('torch.')})", copies=copies, same=not copies
    )


def _positional_copy(node: Node) -> bool:
    flags = [a for a in node.args[1:] if isinstance(a, bool)]
    return len(flags) > 1 and flags[1]


def noted_dtypes_hold(view: GraphView) -> bool:
    """Whether the dtypes that capture noted are still those of the module's tensors."""
    cached = view.__dict__.get("noted_dtypes_hold")
    if cached is None:
        cached = view.__dict__["noted_dtypes_hold"] = all(_dtype_holds(view, node) for node in view.nodes)
    return bool(cached)


def _dtype_holds(view: GraphView, node: Node) -> bool:
    noted = example_value(node)
    if noted is None:
        return True
    if node.op == "get_attr":
        operand = view.operand(node)
        return operand is None or operand.tensor.dtype == noted.dtype
    module = view.module(str(node.target)) if node.op == "call_module" else None
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or not noted.is_floating_point():
        return True
    return weight.dtype == noted.dtype


# --- shapes ------------------------------------------------------------------------------------------------------


@rule("view", "reshape", "expand", "_unsafe_view", "flatten", "unflatten", "expand_as", "view_as", "reshape_as")
def _same_shape(view: GraphView, node: Node) -> NoOp | str | None:
    before, after = example_value(node.args[0]), example_value(node)
    if before is None or after is None or not (proves_shapes(before) and proves_shapes(after)):
        return None
    if before.dtype != after.dtype or not same_sizes(before.shape, after.shape):
        return _undone(view, node, before, after)
    return NoOp("its input has this shape already")


def _undone(view: GraphView, node: Node, before: torch.Tensor, after: torch.Tensor) -> NoOp | None:
    """A reshape of a reshape, back to the shape it had."""
    inner = node.args[0]
    names = {"view", "reshape", "flatten", "unflatten", "_unsafe_view", "view_as", "reshape_as", "unsqueeze"}
    if not isinstance(inner, Node) or name_of(inner) not in names or not {name_of(node)} <= names:
        return None
    origin = example_value(source_of(node, 2))
    if origin is None or not proves_shapes(origin) or origin.dtype != after.dtype:
        return None
    same = same_sizes(origin.shape, after.shape)
    return NoOp("it takes the reshape before it back", back=2, copies=True) if same else None


@rule("slice")
def _slice(view: GraphView, node: Node) -> NoOp | str | None:
    given = dict(zip(("self", "dim", "start", "end", "step"), node.args, strict=False)) | dict(node.kwargs)
    start, end, step = given.get("start"), given.get("end"), given.get("step", 1)
    whole = end is None or (isinstance(end, int) and end > _END)
    is_op = isinstance(node.target, torch._ops.OpOverload)
    return NoOp("it takes all of an axis") if is_op and start in (None, 0) and whole and step == 1 else None


@rule("transpose", "swapaxes", "swapdims", "t", "permute")
def _transpose(view: GraphView, node: Node) -> NoOp | str | None:
    order = _order(node)
    if order is None:
        return None
    if order == list(range(len(order))):
        return NoOp("it leaves the axes in their order")
    inner: Any = node.args[0]
    inner_order = _order(inner)
    if inner_order is None or len(inner_order) != len(order) or not isinstance(inner.args[0], Node):
        return None
    back = [inner_order[axis] for axis in order] == list(range(len(order)))
    return NoOp("it takes the transpose before it back", back=2) if back else None


def _order(node: Node) -> list[int] | None:
    """The order in which a call puts axes; None where it is not such a call or its rank is not known."""
    if node.op not in ("call_function", "call_method"):
        return None
    name, rank = name_of(node), rank_of(node)
    if rank is None:
        return None
    dims: Any
    if name == "permute":
        dims = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], list | tuple) else node.args[1:]
        dims = dims or node.kwargs.get("dims", ())
        return [d % rank for d in dims] if len(dims) == rank and all(isinstance(d, int) for d in dims) else None
    if name not in ("transpose", "swapaxes", "swapdims", "t"):
        return None
    a, b = (0, 1) if name == "t" else (node.args[1:3] if len(node.args) == 3 else (None, None))
    if not isinstance(a, int) or not isinstance(b, int) or rank < 2:
        return None
    order = list(range(rank))
    order[a % rank], order[b % rank] = order[b % rank], order[a % rank]
    return order


_PADS = frozenset({F.pad, torch.constant_pad_nd, aten.pad.default, aten.constant_pad_nd.default})


@rule("pad", "constant_pad_nd")
def _pad(view: GraphView, node: Node) -> NoOp | str | None:
    amounts = node.args[1] if len(node.args) > 1 else node.kwargs.get("pad")
    if node.target not in _PADS or not isinstance(amounts, list | tuple):
        return None
    return NoOp("it pads nothing", copies=True) if all(type(a) is int and a == 0 for a in amounts) else None


# --- arithmetic --------------------------------------------------------------------------------------------------

_NEUTRAL = {"add": 0, "sub": 0, "mul": 1, "div": 1, "truediv": 1, "true_divide": 1}


@rule(*_NEUTRAL)
def _neutral(view: GraphView, node: Node) -> NoOp | str | None:
    other = node.args[1] if len(node.args) == 2 else None
    name = name_of(node)
    if isinstance(other, bool) or not isinstance(other, int | float) or other != _NEUTRAL[name] or node.kwargs:
        return None
    before, after = example_value(node.args[0]), example_value(node)
    if before is None or after is None or before.dtype != after.dtype:
        return None
    negative = str(other).startswith("-")
    if after.is_floating_point() and name in ("add", "sub") and negative != (name == "add"):
        return f"{'-0.0 + 0' if name == 'add' else '-0.0 - -0.0'} is 0.0, so it changes a bit"
    if not noted_dtypes_hold(view):
        return "the dtypes that capture noted no longer hold: the module was cast since"
    return NoOp(f"{name} with {other}", copies=True)


@rule("neg", "negative", "bitwise_not", "invert")
def _negation(view: GraphView, node: Node) -> NoOp | str | None:
    inner = node.args[0]
    twice = isinstance(inner, Node) and inner.target == node.target and inner.op == node.op
    return NoOp("a double negation", back=2, copies=True) if twice and len(node.args) == 1 else None
