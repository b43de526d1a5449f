"""What each operator that masks are made of does to the formulas of its operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from refold import index_expressions as ix
from refold.index_expressions import Affine, Element, Formula, Number, Unknown, affine, choose, map_leaves
from refold.mask_analysis import NotUnderstood, Operands, Size, Symbol, Value, noted_shape, rule
from refold.match import proves_shapes


def made(noted: torch.Tensor | None, dtype: torch.dtype, shape: tuple[Size, ...], element: Element) -> Value:
    """A value, with the sizes that capture noted where it did, and where they hold for every run."""
    if noted is not None and noted.dim() == len(shape) and proves_shapes(noted):
        shape = noted_shape(noted)
    return Value(dtype, shape, element)


def tensor_of(value: Any) -> Value:
    """An operand that must be a tensor."""
    if isinstance(value, Value):
        return value
    raise NotUnderstood("one of its operands is not a tensor that is understood")


def _sizes(values: Any) -> tuple[Size, ...]:
    return tuple(v.name if isinstance(v, Symbol) else v if isinstance(v, int) else None for v in values)


def _constant(value: Any, dtype: torch.dtype) -> Element:
    if isinstance(value, Symbol):
        raise NotUnderstood("it is filled with a size")
    return ix.scalar_element(torch.tensor(value, dtype=dtype))


# --- tensors out of nothing --------------------------------------------------------------------------------------


@rule("arange")
def _arange(of: Operands) -> Value:
    only_end = len(of.args) == 1 and "end" not in of.kwargs
    given = dict(zip(("end",) if only_end else ("start", "end", "step"), of.args, strict=False)) | of.kwargs
    start, end, step = given.get("start", 0), given["end"], given.get("step", 1)
    dtype = of.kwargs.get("dtype") or torch.int64
    whole = isinstance(start, int) and isinstance(step, int) and isinstance(end, int | Symbol)
    if not whole or dtype not in (torch.int64, torch.int32):
        raise NotUnderstood("it counts in a way that is not understood")
    size: Size = max(0, math.ceil((end - start) / step)) if isinstance(end, int) else None
    return made(of.noted, dtype, (size,), affine(start, {-1: step}))


def _fill(of: Operands, shape: tuple[Size, ...], value: Any, default: torch.dtype) -> Value:
    dtype = of.kwargs.get("dtype") or default
    if not isinstance(dtype, torch.dtype):
        raise NotUnderstood("its dtype is not understood")
    return made(of.noted, dtype, shape, _constant(value, dtype))


@rule("full")
def _full(of: Operands) -> Value:
    value = of.get(1, "fill_value")
    default = torch.tensor(value).dtype
    return _fill(of, _sizes(of.get(0, "size")), value, default)


def _scalar(name: str) -> None:
    @rule(name)
    def make(of: Operands) -> Value:
        value = of.args[0]
        if not isinstance(value, bool | int | float):
            raise NotUnderstood("it holds more than a number")
        return _fill(of, (), value, getattr(torch, name)(value).dtype)


_scalar("tensor")
_scalar("scalar_tensor")


def listed_sizes(values: tuple[Any, ...]) -> tuple[Size, ...]:
    """Sizes given as one list or one by one."""
    return _sizes(values[0] if len(values) == 1 and isinstance(values[0], list | tuple) else values)


def _filled(value: int) -> None:
    name = "ones" if value else "zeros"

    @rule(name)
    def make(of: Operands) -> Value:
        return _fill(of, listed_sizes(of.args or (of.kwargs["size"],)), value, torch.get_default_dtype())

    @rule(f"new_{name}")
    def make_new(of: Operands) -> Value:
        return _fill(of, listed_sizes(of.args[1:] or (of.kwargs["size"],)), value, tensor_of(of.args[0]).dtype)

    @rule(f"{name}_like")
    def make_like(of: Operands) -> Value:
        like = tensor_of(of.args[0])
        return _fill(of, like.shape, value, like.dtype)


_filled(0)
_filled(1)


@rule("new_full")
def _new_full(of: Operands) -> Value:
    return _fill(of, _sizes(of.get(1, "size")), of.get(2, "fill_value"), tensor_of(of.args[0]).dtype)


@rule("full_like")
def _full_like(of: Operands) -> Value:
    like = tensor_of(of.args[0])
    return _fill(of, like.shape, of.get(1, "fill_value"), like.dtype)


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
    raise NotUnderstood("one of its operands is not understood")


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


def _arithmetic(name: str, reverse: bool = False) -> Any:
    def of_positions(x: Affine, y: Affine) -> Element | None:
        if name != "mul":
            return x.plus(y, 1 if name == "add" else -1)
        scaled, factor = (x, y) if not y.slopes else (y, x)
        return None if factor.slopes else Affine(0).plus(scaled, factor.constant)

    def apply(of: Operands) -> Value:
        a, b = of.args[0], of.get(1, "other")
        if of.get(2, "alpha", 1) != 1:
            raise NotUnderstood("it scales what it adds")
        a, b = (b, a) if reverse else (a, b)
        dtype = _result_type(a, b)
        if dtype == torch.bool:
            raise NotUnderstood("it does arithmetic with truth values")
        rule_of_positions = of_positions if dtype in (torch.int64, torch.int32) else lambda x, y: None
        return made(of.noted, dtype, _broadcast(a, b), _computed(name, a, b, rule_of_positions))

    return apply


def _result_type(a: Any, b: Any) -> torch.dtype:
    def like(v: Any) -> Any:
        return torch.empty((1,) * v.rank, dtype=v.dtype) if isinstance(v, Value) else v

    return torch.result_type(like(a), like(b))


for _name in ("add", "sub", "mul"):
    rule(_name, f"__{_name}__")(_arithmetic(_name))
rule("rsub")(_arithmetic("sub", reverse=True))


def _affine_comparison(name: str, a: Affine, b: Affine) -> Formula:
    if name in ("eq", "ne"):
        return ix.equal(a, b) if name == "eq" else ix.negate(ix.equal(a, b))
    if name in ("ge", "lt"):
        return ix.at_least(a, b) if name == "ge" else ix.negate(ix.at_least(a, b))
    return ix.at_least(b, a) if name == "le" else ix.negate(ix.at_least(b, a))


def _comparison(name: str) -> Any:
    def apply(of: Operands) -> Value:
        a, b = of.args[0], of.get(1, "other")
        found = _computed(name, a, b, lambda x, y: _affine_comparison(name, x, y))
        return made(of.noted, torch.bool, _broadcast(a, b), found)

    return apply


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    rule(_name, f"__{_name}__")(_comparison(_name))


# --- logic and choice --------------------------------------------------------------------------------------------


def _truth(value: Any) -> Formula | Unknown:
    if isinstance(value, Unknown):
        return value
    element = _element(value)
    if isinstance(element, Unknown):
        return element
    if not ix.is_formula(element):
        raise NotUnderstood("it takes numbers for truth values")
    return element  # type: ignore[return-value]


def _logical(name: str) -> Any:
    decisive = name == "or"

    def apply(of: Operands) -> Value:
        a, b = of.args[0], of.get(1, "other")
        left, right = _truth(a), _truth(b)
        if isinstance(left, Unknown) or isinstance(right, Unknown):
            known = right if isinstance(left, Unknown) else left
            if known is not decisive:  # x ∧ False is False whatever x is, and x ∨ True is True
                raise NotUnderstood(next(x.reason for x in (left, right) if isinstance(x, Unknown)))
            if of.noted is None:
                raise NotUnderstood("the rank of one of its operands is not known")
            return Value(torch.bool, noted_shape(of.noted), decisive)
        join = ix.disjoin if decisive else ix.conjoin
        return made(of.noted, torch.bool, _broadcast(a, b), join(left, right))

    return apply


rule("__and__", "bitwise_and", "logical_and")(_logical("and"))
rule("__or__", "bitwise_or", "logical_or")(_logical("or"))


@rule("bitwise_not", "logical_not", "__invert__", "invert")
def _invert(of: Operands) -> Value:
    given = tensor_of(of.args[0])
    truth = _truth(given)
    return Value(torch.bool, given.shape, truth if isinstance(truth, Unknown) else ix.negate(truth))


@rule("where")
def _where(of: Operands) -> Value:
    condition, then, other = of.args[0], of.get(1, "self"), of.get(2, "other")
    truth = _truth(tensor_of(condition))
    if isinstance(truth, Unknown):
        raise NotUnderstood(truth.reason)
    if isinstance(then, Unknown) or isinstance(other, Unknown):
        chosen = {True: then, False: other}.get(truth) if isinstance(truth, bool) else None
        if chosen is None or isinstance(chosen, Unknown) or of.noted is None:
            raise NotUnderstood(next(x.reason for x in (then, other) if isinstance(x, Unknown)))
        return Value(of.noted.dtype, noted_shape(of.noted), _element(chosen))
    return _chosen(of, condition, truth, then, other)


def _chosen(of: Operands, condition: Any, truth: Formula, then: Any, other: Any) -> Value:
    dtype = of.noted.dtype if of.noted is not None else _result_type(then, other)
    element = choose(truth, _cast(_element(then), dtype), _cast(_element(other), dtype))
    return made(of.noted, dtype, _broadcast(condition, then, other), element)


@rule("masked_fill")
def _masked_fill(of: Operands) -> Value:
    given, mask, value = tensor_of(of.args[0]), tensor_of(of.get(1, "mask")), of.get(2, "value")
    truth = _truth(mask)
    if isinstance(truth, Unknown):
        raise NotUnderstood(truth.reason)
    element = choose(truth, _cast(_element(value), given.dtype), given.element)
    return made(of.noted, given.dtype, _broadcast(given, mask), element)


def _triangular(name: str) -> None:
    @rule(name)
    def apply(of: Operands) -> Value:
        given, diagonal = tensor_of(of.args[0]), of.get(1, "diagonal", 0)
        offset = affine(diagonal, {-2: 1, -1: -1})  # i + diagonal − j
        inside = ix.at_least(offset, Affine(0)) if name == "tril" else ix.at_least(Affine(0), offset)
        zero = _constant(0, given.dtype)
        return Value(given.dtype, given.shape, choose(inside, given.element, zero))


_triangular("tril")
_triangular("triu")


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


@rule("to", "_to_copy", "type", "type_as")
def _to(of: Operands) -> Value:
    given = tensor_of(of.args[0])
    everything = [*of.args[1:], *of.kwargs.values()]
    if any(isinstance(x, type) or (isinstance(x, str) and x.endswith("Tensor")) for x in everything):
        raise NotUnderstood("it is cast to a type that is not understood")
    dtypes = [x if isinstance(x, torch.dtype) else x.dtype for x in everything if isinstance(x, torch.dtype | Value)]
    dtype = dtypes[0] if dtypes else given.dtype
    return Value(dtype, given.shape, _cast(given.element, dtype))


def _named_cast(name: str, dtype: torch.dtype) -> None:
    @rule(name)
    def apply(of: Operands) -> Value:
        given = tensor_of(of.args[0])
        return Value(dtype, given.shape, _cast(given.element, dtype))


for _name, _dtype in {"bool": torch.bool, "int": torch.int32, "long": torch.int64, "float": torch.float32}.items():
    _named_cast(_name, _dtype)


@rule("clone", "contiguous", "alias", "detach", "lift_fresh", "lift_fresh_copy")
def _same(of: Operands) -> Value:
    return tensor_of(of.args[0])
