"""What each operator that masks are made of does to the formulas of its operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from refold.graph.arguments import argument
from refold.graph.values import proves_shapes
from refold.patterns.masks import formulas as ix
from refold.patterns.masks.formulas import Affine, Element, Formula, Number, Unknown, affine, choose, map_leaves
from refold.patterns.masks.operands import RULES, Operands, Size, Symbol, Value, recorded_shape
from refold.rewrite.refusal import Refuse


def made(recorded: torch.Tensor | None, dtype: torch.dtype, shape: tuple[Size, ...], element: Element) -> Value:
    """A value, with the sizes that capture recorded where it did, and where they hold for every run."""
    if recorded is not None and recorded.dim() == len(shape) and proves_shapes(recorded):
        shape = recorded_shape(recorded)
    return Value(dtype, shape, element)


def tensor_of(value: Any) -> Value:
    """An operand that must be a tensor."""
    if isinstance(value, Value):
        return value
    raise Refuse("one of its operands is not a tensor that is understood")


def _sizes(values: Any) -> tuple[Size, ...]:
    return tuple(v.name if isinstance(v, Symbol) else v if isinstance(v, int) else None for v in values)


def _constant(value: Any, dtype: torch.dtype) -> Element:
    if isinstance(value, Symbol):
        raise Refuse("it is filled with a size")
    return ix.scalar_element(torch.tensor(value, dtype=dtype))


# --- tensors out of nothing --------------------------------------------------------------------------------------


@RULES("arange")
def _arange(of: Operands) -> Value:
    only_end = len(of.args) == 1 and "end" not in of.kwargs
    given = dict(zip(("end",) if only_end else ("start", "end", "step"), of.args, strict=False)) | of.kwargs
    start, end, step = given.get("start", 0), given["end"], given.get("step", 1)
    dtype = of.kwargs.get("dtype") or torch.int64
    whole = isinstance(start, int) and isinstance(step, int) and isinstance(end, int | Symbol)
    if not whole or dtype not in (torch.int64, torch.int32):
        raise Refuse("it counts in a way that is not understood")
    size: Size = max(0, math.ceil((end - start) / step)) if isinstance(end, int) else None
    return made(of.recorded, dtype, (size,), affine(start, {-1: step}))


def _filled(of: Operands, shape: tuple[Size, ...], value: Any, default: torch.dtype) -> Value:
    dtype = of.kwargs.get("dtype") or default
    if not isinstance(dtype, torch.dtype):
        raise Refuse("its dtype is not understood")
    return made(of.recorded, dtype, shape, _constant(value, dtype))


def listed_sizes(values: tuple[Any, ...]) -> tuple[Size, ...]:
    """Sizes given as one list or one by one."""
    return _sizes(values[0] if len(values) == 1 and isinstance(values[0], list | tuple) else values)


@RULES("full", "new_full", "full_like")
def _full(of: Operands) -> Value:
    like = None if of.name == "full" else tensor_of(of.args[0])
    value = argument(of, 2 if of.name == "new_full" else 1, "fill_value")
    if like is not None and of.name == "full_like":
        return _filled(of, like.shape, value, like.dtype)
    sizes = _sizes(argument(of, 0 if like is None else 1, "size"))
    return _filled(of, sizes, value, torch.tensor(value).dtype if like is None else like.dtype)


@RULES("zeros", "new_zeros", "zeros_like", "ones", "new_ones", "ones_like")
def _zeros_or_ones(of: Operands) -> Value:
    value = int("ones" in of.name)
    if of.name in ("zeros", "ones"):
        return _filled(of, listed_sizes(of.args or (of.kwargs["size"],)), value, torch.get_default_dtype())
    like = tensor_of(of.args[0])
    shape = like.shape if of.name.endswith("_like") else listed_sizes(of.args[1:] or (of.kwargs["size"],))
    return _filled(of, shape, value, like.dtype)


@RULES("tensor", "scalar_tensor")
def _scalar(of: Operands) -> Value:
    value = of.args[0]
    if not isinstance(value, bool | int | float):
        raise Refuse("it holds more than a number")
    return _filled(of, (), value, getattr(torch, of.name)(value).dtype)


# --- arithmetic --------------------------------------------------------------------------------------------------


def _broadcast(*values: Any) -> tuple[Size, ...]:
    shapes = [v.shape for v in values if isinstance(v, Value)]
    rank = max(len(s) for s in shapes)
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    return tuple(_joint([s[i] for s in padded]) for i in range(rank))


def _joint(sizes: list[Size]) -> Size:
    others = {s for s in sizes if s != 1}
    return 1 if not others else others.pop() if len(others) == 1 else None


def _element(value: Any) -> Element:
    if isinstance(value, Value):
        return value.element
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return Affine(value)
    if isinstance(value, float):
        return Number(value)
    raise Refuse("one of its operands is not understood")


def _as_number(element: Element) -> Element:
    return choose(element, Affine(1), Affine(0)) if ix.is_formula(element) else element  # type: ignore[arg-type]


def _plain(element: Element) -> int | float | None:
    if isinstance(element, Number):
        return element.value
    return element.constant if isinstance(element, Affine) and not element.slopes else None


_LARGEST = 1 << 24
"""Where whole numbers are computed with that are larger, one may not fit into its dtype."""


def _computed(name: str, a: Any, b: Any, affine_rule: Callable[[Affine, Affine], Element | None]) -> Element:
    """One operation between two operands: between positions by a rule, between numbers by doing it in their dtypes."""

    def leaf(x: Element, y: Element) -> Element:
        left, right = _plain(x), _plain(y)
        if left is not None and right is not None:
            return ix.scalar_element(getattr(torch, name)(_alone(a, left), _alone(b, right)).reshape(()))
        whole = isinstance(x, Affine) and isinstance(y, Affine) and _is_small(x) and _is_small(y)
        found = affine_rule(x, y) if whole else None  # type: ignore[arg-type]
        return Unknown("it mixes values in a way that is not understood") if found is None else found

    return map_leaves(_as_number(_element(a)), lambda x: map_leaves(_as_number(_element(b)), lambda y: leaf(x, y)))


def _alone(operand: Any, value: int | float) -> Any:
    """One element of an operand, which is a tensor of its rank or a number."""
    return torch.full((1,) * operand.rank, value, dtype=operand.dtype) if isinstance(operand, Value) else operand


def _is_small(expression: Affine) -> bool:
    return all(abs(n) <= _LARGEST for n in (expression.constant, *(slope for _, slope in expression.slopes)))


def _combine_positions(name: str, x: Affine, y: Affine) -> Element | None:
    if name != "mul":
        return x.plus(y, 1 if name == "add" else -1)
    scaled, factor = (x, y) if not y.slopes else (y, x)
    return None if factor.slopes else Affine(0).plus(scaled, factor.constant)


@RULES("add", "__add__", "sub", "__sub__", "mul", "__mul__", "rsub")
def _arithmetic(of: Operands) -> Value:
    a, b, name = of.args[0], argument(of, 1, "other"), of.name.strip("_")
    if argument(of, 2, "alpha", 1) != 1:
        raise Refuse("it scales what it adds")
    if name == "rsub":
        a, b, name = b, a, "sub"
    dtype = _result_type(a, b)
    if dtype == torch.bool:
        raise Refuse("it does arithmetic with truth values")
    whole = dtype in (torch.int64, torch.int32)
    found = _computed(name, a, b, lambda x, y: _combine_positions(name, x, y) if whole else None)
    return made(of.recorded, dtype, _broadcast(a, b), found)


def _result_type(a: Any, b: Any) -> torch.dtype:
    return torch.result_type(_alone(a, 0), _alone(b, 0))


def _compare_positions(name: str, a: Affine, b: Affine) -> Formula:
    if name in ("eq", "ne"):
        return ix.equal(a, b) if name == "eq" else ix.negate(ix.equal(a, b))
    if name in ("ge", "lt"):
        return ix.at_least(a, b) if name == "ge" else ix.negate(ix.at_least(a, b))
    return ix.at_least(b, a) if name == "le" else ix.negate(ix.at_least(b, a))


@RULES("eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
def _comparison(of: Operands) -> Value:
    a, b, name = of.args[0], argument(of, 1, "other"), of.name.strip("_")
    found = _computed(name, a, b, lambda x, y: _compare_positions(name, x, y))
    return made(of.recorded, torch.bool, _broadcast(a, b), found)


# --- logic and choice --------------------------------------------------------------------------------------------


def _truth(value: Any) -> Formula | Unknown:
    element = value if isinstance(value, Unknown) else _element(value)
    if not isinstance(element, Unknown) and not ix.is_formula(element):
        raise Refuse("it takes numbers for truth values")
    return element  # type: ignore[return-value]


def _known_truth(value: Any) -> Formula:
    truth = _truth(tensor_of(value))
    if isinstance(truth, Unknown):
        raise Refuse(truth.reason)
    return truth


@RULES("__and__", "bitwise_and", "logical_and", "__or__", "bitwise_or", "logical_or")
def _logical(of: Operands) -> Value:
    decisive = of.name.strip("_").endswith("or")
    a, b = of.args[0], argument(of, 1, "other")
    left, right = _truth(a), _truth(b)
    if isinstance(left, Unknown) or isinstance(right, Unknown):
        known = right if isinstance(left, Unknown) else left
        if known is not decisive:  # x ∧ False is False whatever x is, and x ∨ True is True
            raise Refuse(next(x.reason for x in (left, right) if isinstance(x, Unknown)))
        if of.recorded is None:
            raise Refuse("the rank of one of its operands is not known")
        return Value(torch.bool, recorded_shape(of.recorded), decisive)
    join = ix.disjoin if decisive else ix.conjoin
    return made(of.recorded, torch.bool, _broadcast(a, b), join(left, right))


@RULES("bitwise_not", "logical_not", "__invert__", "invert")
def _invert(of: Operands) -> Value:
    given = tensor_of(of.args[0])
    truth = _truth(given)
    return Value(torch.bool, given.shape, truth if isinstance(truth, Unknown) else ix.negate(truth))


@RULES("where")
def _where(of: Operands) -> Value:
    condition, then, other = of.args[0], argument(of, 1, "self"), argument(of, 2, "other")
    truth = _known_truth(condition)
    if isinstance(then, Unknown) or isinstance(other, Unknown):
        chosen = {True: then, False: other}.get(truth) if isinstance(truth, bool) else None
        if chosen is None or isinstance(chosen, Unknown) or of.recorded is None:
            raise Refuse(next(x.reason for x in (then, other) if isinstance(x, Unknown)))
        return Value(of.recorded.dtype, recorded_shape(of.recorded), _element(chosen))
    return _chosen(of, condition, truth, then, other)


def _chosen(of: Operands, condition: Any, truth: Formula, then: Any, other: Any) -> Value:
    dtype = of.recorded.dtype if of.recorded is not None else _result_type(then, other)
    element = choose(truth, _cast(_element(then), dtype), _cast(_element(other), dtype))
    return made(of.recorded, dtype, _broadcast(condition, then, other), element)


@RULES("masked_fill")
def _masked_fill(of: Operands) -> Value:
    given, mask, value = tensor_of(of.args[0]), tensor_of(argument(of, 1, "mask")), argument(of, 2, "value")
    element = choose(_known_truth(mask), _cast(_element(value), given.dtype), given.element)
    return made(of.recorded, given.dtype, _broadcast(given, mask), element)


@RULES("tril", "triu")
def _triangular(of: Operands) -> Value:
    given, diagonal = tensor_of(of.args[0]), argument(of, 1, "diagonal", 0)
    offset = affine(diagonal, {-2: 1, -1: -1})  # i + diagonal − j
    inside = ix.at_least(offset, Affine(0)) if of.name == "tril" else ix.at_least(Affine(0), offset)
    return Value(given.dtype, given.shape, choose(inside, given.element, _constant(0, given.dtype)))


# --- casts -------------------------------------------------------------------------------------------------------


def _cast(element: Element, dtype: torch.dtype) -> Element:
    def leaf(x: Element) -> Element:
        value = _plain(x)
        if value is not None:
            exact = torch.float64 if isinstance(value, float) else torch.int64
            return ix.scalar_element(torch.tensor(value, dtype=exact).to(dtype))
        if dtype in (torch.int64, torch.int32) or isinstance(x, Unknown):
            return x
        return Unknown("it turns positions into another kind of number")

    if ix.is_formula(element) and dtype == torch.bool:
        return element
    return map_leaves(_as_number(element), leaf)


_CASTS = {"bool": torch.bool, "int": torch.int32, "long": torch.int64, "float": torch.float32}


@RULES("to", "_to_copy", "type", "type_as", *_CASTS)
def _to(of: Operands) -> Value:
    given = tensor_of(of.args[0])
    everything = [*of.args[1:], *of.kwargs.values()]
    if any(isinstance(x, type) or (isinstance(x, str) and x.endswith("Tensor")) for x in everything):
        raise Refuse("it is cast to a type that is not understood")
    dtypes = [x if isinstance(x, torch.dtype) else x.dtype for x in everything if isinstance(x, torch.dtype | Value)]
    dtype = _CASTS.get(of.name) or (dtypes[0] if dtypes else given.dtype)
    return Value(dtype, given.shape, _cast(given.element, dtype))


@RULES("clone", "contiguous", "alias", "detach", "lift_fresh", "lift_fresh_copy")
def _same(of: Operands) -> Value:
    return tensor_of(of.args[0])
