"""What the values of operators follow that compute element by element, reduce, move, cut, join and multiply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from refold.graph.arguments import argument, axis_order
from refold.graph.layout import has_dtype
from refold.graph.targets import name_of
from refold.patterns.dimensions.layer_rules import mixed_along
from refold.patterns.dimensions.sized_calls import (
    MIXES,
    RULES,
    Dims,
    Followed,
    NotUnderstood,
    SizedCall,
    join,
    recorded_sizes,
    regrouped,
    surely,
    surely_equal,
)


def _first(call: SizedCall) -> Any:
    return argument(call.node, 0, "input")


def _dims_of(value: Any) -> list[int]:
    dims = list(value) if isinstance(value, list | tuple) else [value]
    if not dims or not all(isinstance(d, int) for d in dims):
        raise NotUnderstood
    return dims


# --- element by element --------------------------------------------------------------------------------------------

_ELEMENTWISE = (
    "add", "sub", "rsub", "mul", "div", "truediv", "true_divide", "floordiv", "floor_divide", "remainder", "mod",
    "fmod", "pow", "neg", "abs", "square", "sqrt", "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p", "erf", "sin",
    "cos", "atan2", "sign", "sgn", "floor", "ceil", "round", "trunc", "clamp", "clamp_min", "clamp_max", "minimum",
    "maximum", "lerp", "addcmul", "addcdiv", "nan_to_num", "gelu", "relu", "relu6", "silu", "sigmoid", "tanh",
    "softplus", "hardtanh", "hardswish", "hardsigmoid", "leaky_relu", "elu", "celu", "selu", "mish", "log_sigmoid",
    "logsigmoid", "logit", "threshold", "where", "masked_fill", "ge", "gt", "le", "lt", "eq", "ne", "isnan", "isinf",
    "logical_not", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor",
    "bitwise_not", "__and__", "__or__", "__xor__", "invert", "and_", "or_", "xor", "bitwise_left_shift",
    "bitwise_right_shift", "lshift", "rshift", "to", "_to_copy", "type", "float", "half", "double", "bfloat16", "int",
    "long", "bool", "contiguous", "clone", "detach", "alias", "lift_fresh_copy", "dropout", "positive", "pos",
    "type_as", "exp2", "log2", "log10", "erfc", "tan", "sinh", "cosh", "asin", "acos", "atan", "rad2deg", "deg2rad",
)  # fmt: skip


@RULES(*_ELEMENTWISE)
def _elementwise(call: SizedCall) -> Followed:
    """Operands are broadcast to the result; a tensor behind a cast's first may only give the dtype."""
    return join([{n: call.broadcast(n)} for n in call.node.all_input_nodes if recorded_sizes(n) is not None])


@RULES("zeros_like", "ones_like", "full_like")
def _like(call: SizedCall) -> Followed:
    """Of the operand that is made alike, only sizes or values of the first are read; others give a dtype."""
    first = _first(call)
    others = [n for n in call.node.all_input_nodes if n is not first]
    return call.follows(*others, dims=(None,) * call.rank) | {first: call.broadcast(first)}


_NEW = ("arange", "zeros", "ones", "full", "scalar_tensor", "new_ones", "new_zeros", "new_full", "eye", "linspace",
        "triu_indices", "tril_indices", "empty", "new_empty", "tensor")  # fmt: skip


@RULES(*_NEW)
def _new(call: SizedCall) -> Followed:
    return call.follows(*call.node.all_input_nodes, dims=(None,) * call.rank)


# --- reductions, and what runs over a dimension ----------------------------------------------------------------------


@RULES("mean", "sum", "amax", "amin", "var", "std", "any", "all", "argmax", "argmin", "prod", "logsumexp", "max", "min")
def _reduction(call: SizedCall) -> Followed:
    second = argument(call.node, 1, "other") if name_of(call.node) in ("max", "min") else None
    if isinstance(second, Node):
        return _elementwise(call)
    return {_first(call): _reduced(call, argument(call.node, 1, "dim"))}


@RULES("norm", "linalg_vector_norm")
def _vector_norm(call: SizedCall) -> Followed:
    return {_first(call): _reduced(call, argument(call.node, 2, "dim"))}


def _reduced(call: SizedCall, dim: Any) -> Dims:
    given = _first(call)
    rank = len(call.sizes_of(given))
    if dim is None or dim == []:
        return (MIXES,) * call.rank
    dims = {d % rank for d in _dims_of(dim)}
    if call.rank == rank:
        return call.kept(given, [MIXES if d in dims else d for d in range(rank)])
    return call.kept(given, [d for d in range(rank) if d not in dims])


@RULES("softmax", "_softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "flip")
def _along(call: SizedCall) -> Followed:
    return {
        _first(call): mixed_along(
            call, _first(call), _dims_of(argument(call.node, 1, "dim", argument(call.node, 1, "dims")))
        )
    }


@RULES("roll")
def _roll(call: SizedCall) -> Followed:
    return {_first(call): mixed_along(call, _first(call), _dims_of(argument(call.node, 2, "dims")))}


@RULES("topk")
def _topk(call: SizedCall) -> Followed:
    return {_first(call): mixed_along(call, _first(call), [argument(call.node, 2, "dim", -1)])}


@RULES("sort", "argsort")
def _sort(call: SizedCall) -> Followed:
    dim = argument(call.node, 1, "dim", -1)
    return {_first(call): mixed_along(call, _first(call), _dims_of(-1 if isinstance(dim, bool) else dim))}


# --- axes move, come and go ------------------------------------------------------------------------------------------


@RULES("transpose", "swapaxes", "swapdims", "t", "permute")
def _permute(call: SizedCall) -> Followed:
    order = axis_order(name_of(call.node), call.node, call.rank)
    if order is None:
        raise NotUnderstood
    return {_first(call): call.kept(_first(call), order)}


@RULES("unsqueeze")
def _unsqueeze(call: SizedCall) -> Followed:
    place = argument(call.node, 1, "dim") % call.rank
    return {_first(call): call.kept(_first(call), [*range(place), None, *range(place, call.rank - 1)])}


@RULES("squeeze")
def _squeeze(call: SizedCall) -> Followed:
    given = call.sizes_of(_first(call))
    dim = argument(call.node, 1, "dim")
    chosen = range(len(given)) if dim is None else {d % len(given) for d in _dims_of(dim)}
    gone = {d for d in chosen if surely_equal(given[d], 1)}
    if not all(d in gone or surely(given[d] != 1) for d in chosen):
        raise NotUnderstood
    return {_first(call): call.kept(_first(call), [d for d in range(len(given)) if d not in gone])}


@RULES("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as")
def _reshape(call: SizedCall) -> Followed:
    if has_dtype(call.node):
        raise NotUnderstood
    first = _first(call)
    others = call.follows(*(n for n in call.node.all_input_nodes if n is not first), dims=(None,) * call.rank)
    return others | {first: _reshaped(call.sizes_of(first), call.sizes)}


def _reshaped(old: Sequence[Any], new: Sequence[Any]) -> Dims:
    found: list[Any] = [MIXES] * len(new)
    for mine, theirs in regrouped(tuple(old), tuple(new)):
        long_old = [d for d in mine if not surely_equal(old[d], 1)]
        long_new = [d for d in theirs if not surely_equal(new[d], 1)]
        for d in theirs:
            if d not in long_new:
                found[d] = None
        if len(long_old) == len(long_new) == 1:
            found[long_new[0]] = long_old[0]
    return tuple(found)


@RULES("expand", "expand_as", "broadcast_to")
def _expand(call: SizedCall) -> Followed:
    first = _first(call)
    others = call.follows(*(n for n in call.node.all_input_nodes if n is not first), dims=(None,) * call.rank)
    return others | {first: call.broadcast(first)}


@RULES("repeat")
def _repeat(call: SizedCall) -> Followed:
    given = call.sizes_of(_first(call))
    new = call.rank - len(given)
    dims = [None if surely_equal(size, 1) else d for d, size in enumerate(given)]
    return {_first(call): call.kept(_first(call), [None] * new + dims)}


@RULES("repeat_interleave")
def _repeat_interleave(call: SizedCall) -> Followed:
    dim = argument(call.node, 2, "dim")
    if not isinstance(dim, int) or len(call.node.all_input_nodes) > 1:
        raise NotUnderstood
    return {_first(call): mixed_along(call, _first(call), [dim])}


# --- cutting and joining ---------------------------------------------------------------------------------------------


@RULES("slice", "narrow", "constant_pad_nd", "pad", "split", "split_with_sizes", "chunk", "tensor_split")
def _cut(call: SizedCall) -> Followed:
    """Along a dimension that keeps its size, nothing was cut off or put on; others mix. A pad may do both."""
    name = name_of(call.node)
    dims = list(range(call.rank))
    if name in ("split", "split_with_sizes", "chunk", "tensor_split"):
        return {_first(call): mixed_along(call, _first(call), [argument(call.node, 2, "dim", 0)])}
    if name in ("constant_pad_nd", "pad"):
        padded = argument(call.node, 1, "pad")
        if not isinstance(padded, list | tuple):
            raise NotUnderstood
        touched = {call.rank - 1 - i // 2 for i, by in enumerate(padded) if by != 0}
        dims = [MIXES if d in touched else d for d in dims]  # type: ignore[misc]
    return {_first(call): call.kept(_first(call), dims)}


@RULES("select")
def _select(call: SizedCall) -> Followed:
    place = argument(call.node, 1, "dim") % (call.rank + 1)
    return {_first(call): call.kept(_first(call), [d for d in range(call.rank + 1) if d != place])}


@RULES("unbind")
def _unbind(call: SizedCall) -> Followed:
    place = argument(call.node, 1, "dim", 0) % (call.rank + 1)
    return {_first(call): call.kept(_first(call), [d for d in range(call.rank + 1) if d != place])}


@RULES("cat", "concat", "concatenate")
def _cat(call: SizedCall) -> Followed:
    place = argument(call.node, 1, "dim", 0)
    return join([{n: mixed_along(call, n, [place])} for n in _joined(call)])


@RULES("stack")
def _stack(call: SizedCall) -> Followed:
    place = argument(call.node, 1, "dim", 0) % call.rank
    dims = [*range(place), MIXES, *range(place, call.rank - 1)]
    return join([{n: call.kept(n, dims)} for n in _joined(call)])


def _joined(call: SizedCall) -> Sequence[Any]:
    parts = argument(call.node, 0, "tensors")
    if not isinstance(parts, list | tuple):
        raise NotUnderstood
    return parts


@RULES("getitem", "__getitem__")
def _getitem(call: SizedCall) -> Followed:
    given, where = call.node.args
    if isinstance(where, int) and isinstance(given, Node) and isinstance(given.meta.get("val"), tuple | list):
        return {given: tuple(range(call.rank))}  # one of several values
    parts = list(where) if isinstance(where, tuple) else [where]
    return _indexed(call, given, parts)


@RULES("index")
def _index(call: SizedCall) -> Followed:
    given, parts = call.node.args
    return _indexed(call, given, [slice(None) if part is None else part for part in parts])  # type: ignore[union-attr]


def _indexed(call: SizedCall, given: Any, parts: list[Any]) -> Followed:
    rank = len(call.sizes_of(given))
    if Ellipsis in parts:
        missing = rank - sum(part is not None for part in parts) + 1
        place = parts.index(Ellipsis)
        parts[place : place + 1] = [slice(None)] * missing
    tensors = [part for part in parts if isinstance(part, Node) and recorded_sizes(part) is not None]
    if any(part.meta["val"].dtype.is_floating_point or part.meta["val"].dtype.itemsize == 1 for part in tensors):
        raise NotUnderstood  # masks choose as many places as they hold
    if tensors and any(part is None or not isinstance(part, Node | slice) for part in parts):
        raise NotUnderstood
    dims: list[Any] = []
    place, at = 0, None
    for part in parts:
        if part is None:
            dims.append(None)
            continue
        if isinstance(part, slice):
            dims.append(place if part == slice(None) else MIXES)
        elif part in tensors:
            if at is not None and at != len(dims):
                at = -1  # indices apart from each other: their dimensions come first
            at = len(dims) if at is None else at
        place += 1
    dims += range(place, rank)
    if not tensors:
        return {given: call.kept(given, dims)}
    wide = call.rank - len(dims)
    start = 0 if at == -1 else at
    found: Followed = {given: call.kept(given, [*dims[:start], *[MIXES] * wide, *dims[start:]])}
    return _with_indices(call, found, tensors, (start or 0, wide))


def _with_indices(call: SizedCall, found: Followed, tensors: list[Node], place: tuple[int, int]) -> Followed:
    start, wide = place
    after = call.rank - start - wide
    for index in tensors:
        if index in found:
            raise NotUnderstood
        dims = call.broadcast(index, call.sizes[start : start + wide])
        found[index] = (None,) * start + dims + (None,) * after
    return found


@RULES("gather", "take_along_dim")
def _gather(call: SizedCall) -> Followed:
    given, dim, index = _first(call), argument(call.node, 1, "dim"), argument(call.node, 2, "index")
    if name_of(call.node) == "take_along_dim" or given is index:
        raise NotUnderstood
    return {given: mixed_along(call, given, [dim]), index: call.kept(index, range(call.rank))}


@RULES("index_select")
def _index_select(call: SizedCall) -> Followed:
    given, dim, index = _first(call), argument(call.node, 1, "dim"), argument(call.node, 2, "index")
    place = dim % call.rank
    if given is index:
        raise NotUnderstood
    return {
        given: mixed_along(call, given, [dim]),
        index: tuple(0 if d == place else None for d in range(call.rank)),
    }


# --- products --------------------------------------------------------------------------------------------------------


@RULES("matmul", "bmm", "mm", "__matmul__")
def _matmul(call: SizedCall) -> Followed:
    left, right = _first(call), argument(call.node, 1, "other", argument(call.node, 1, "mat2"))
    a, b = call.sizes_of(left), call.sizes_of(right)
    if len(a) < 2:
        raise NotUnderstood
    if len(b) == 1:
        return join([{left: call.kept(left, range(call.rank))}, {right: (None,) * call.rank}])
    lead = call.sizes[:-2]
    rows = (*call.broadcast(left, (*lead, *a[-2:]))[:-1], None)
    columns = (*call.broadcast(right, (*lead, *b[-2:]))[:-2], None, len(b) - 1)
    return join([{left: rows}, {right: columns}])


@RULES("addmm", "baddbmm")
def _addmm(call: SizedCall) -> Followed:
    operands: tuple[Any, ...] = call.node.args[:3]
    added, left, right = operands
    lead = tuple(range(call.rank - 2))
    return join([
        {left: (*lead, call.rank - 2, None)}, {right: (*lead, None, call.rank - 1)}, {added: call.broadcast(added)},
    ])  # fmt: skip


@RULES("einsum")
def _einsum(call: SizedCall) -> Followed:
    equation, *given = call.node.args
    operands: list[Any] = list(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else list(given)
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        raise NotUnderstood
    before, _, after = equation.replace(" ", "").partition("->")
    labels = before.split(",")
    if len(labels) != len(operands) or any(len(set(text)) < len(text) for text in labels):
        raise NotUnderstood
    dims = ([text.index(c) if c in text else None for c in after] for text in labels)
    return join([{n: call.kept(n, d)} for n, d in zip(operands, dims, strict=True)])
