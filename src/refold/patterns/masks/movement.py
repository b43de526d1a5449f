"""What operators that move, repeat, cut and gather elements do to the formulas of a mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from refold.graph.arguments import argument, axis_order
from refold.patterns.masks.elementwise import listed_sizes, made, tensor_of
from refold.patterns.masks.formulas import Affine, Element, Unknown, affine, move_axes, substitute
from refold.patterns.masks.operands import RULES, Operands, Size, Symbol, Value, recorded_shape
from refold.rewrite.refusal import Refuse

_END = 1 << 60


def _depends_on_index(element: Element) -> bool:
    return substitute(element, lambda expression: Affine(expression.constant)) != element


def _reindexed(element: Element, axis: int, start: int, step: int) -> Element:
    """An element with `start + step·index` in the place of the index of an axis."""

    def moved(expression: Affine) -> Affine:
        slopes = dict(expression.slopes)
        slope = slopes.pop(axis, 0)
        return affine(expression.constant + slope * start, slopes | {axis: slope * step})

    return substitute(element, moved)


# --- axes come and go --------------------------------------------------------------------------------------------


@RULES("unsqueeze")
def _unsqueeze(of: Operands) -> Value:
    return unsqueezed(tensor_of(of.args[0]), argument(of, 1, "dim"))


def unsqueezed(given: Value, dim: int) -> Value:
    """A new axis of size 1."""
    place = dim + given.rank + 1 if dim < 0 else dim
    moved = {i - given.rank: i - given.rank - 1 for i in range(place)}  # axes left of it move further left
    return Value(given.dtype, (*given.shape[:place], 1, *given.shape[place:]), move_axes(given.element, moved))


@RULES("squeeze")
def _squeeze(of: Operands) -> Value:
    given, dims = tensor_of(of.args[0]), argument(of, 1, "dim")
    chosen = range(given.rank) if dims is None else dims if isinstance(dims, list | tuple) else [dims]
    places = sorted({d % given.rank for d in chosen}, reverse=True)
    if any(not isinstance(given.shape[p], int) for p in places):
        raise Refuse("it squeezes an axis whose size is not known")
    for place in places:
        if given.shape[place] == 1:
            given = selected(given, place, 0)
    return given


def selected(given: Value, place: int, index: int) -> Value:
    """One index of an axis."""
    fixed = _reindexed(given.element, place - given.rank, index, 0)
    moved = {i - given.rank: i - given.rank + 1 for i in range(place)}
    return Value(given.dtype, (*given.shape[:place], *given.shape[place + 1 :]), move_axes(fixed, moved))


@RULES("select")
def _select(of: Operands) -> Value:
    given, index = tensor_of(of.args[0]), argument(of, 2, "index")
    if not isinstance(index, int) or index < 0:
        raise Refuse("it selects by an index that is not known")
    return selected(given, argument(of, 1, "dim") % given.rank, index)


@RULES("expand", "expand_as", "broadcast_to")
def _expand(of: Operands) -> Value:
    given = tensor_of(of.args[0])
    first = of.args[1] if len(of.args) > 1 else of.kwargs.get("size")
    sizes = first.shape if isinstance(first, Value) else listed_sizes(of.args[1:] or (first,))
    old = (1,) * (len(sizes) - given.rank) + given.shape
    shape = tuple(o if n == -1 else n for o, n in zip(old, sizes, strict=True))
    return made(of.recorded, given.dtype, shape, given.element)


@RULES("transpose", "swapaxes", "swapdims", "t", "permute")
def _permute(of: Operands) -> Value:
    given = tensor_of(of.args[0])
    order = axis_order(of.name, of, given.rank)
    if order is None:
        raise Refuse("its axes are not understood")
    moved = {old - given.rank: new - given.rank for new, old in enumerate(order)}
    return Value(given.dtype, tuple(given.shape[i] for i in order), move_axes(given.element, moved))


@RULES("view", "reshape", "_unsafe_view", "flatten", "unflatten")
def _reshape(of: Operands) -> Value:
    given = tensor_of(of.args[0])
    if of.recorded is None:
        raise Refuse("it is reshaped, and its sizes are not recorded")
    shape = recorded_shape(of.recorded)
    if not _depends_on_index(given.element):
        return Value(given.dtype, shape, given.element)
    old = [(i - given.rank, s) for i, s in enumerate(given.shape) if s != 1]
    new = [(i - len(shape), s) for i, s in enumerate(shape) if s != 1]
    if [s for _, s in old] != [s for _, s in new] or any(s is None for _, s in old):
        raise Refuse("it is reshaped in a way that mixes its axes")
    moved = {a: b for (a, _), (b, _) in zip(old, new, strict=True)}
    return Value(given.dtype, shape, move_axes(given.element, moved))


# --- cutting -----------------------------------------------------------------------------------------------------


@RULES("slice")
def _slice(of: Operands) -> Value:
    given = tensor_of(of.args[0])
    dim, start = argument(of, 1, "dim", 0), argument(of, 2, "start")
    cut = sliced(given, dim % given.rank, start, argument(of, 3, "end"), argument(of, 4, "step", 1))
    return made(of.recorded, cut.dtype, cut.shape, cut.element)


def sliced(given: Value, place: int, start: Any, end: Any, step: Any) -> Value:
    """A range of an axis."""
    start, step = 0 if start is None else start, 1 if step is None else step
    if not isinstance(start, int) or not isinstance(step, int) or start < 0:
        raise Refuse("it starts at a place that is not known")
    element = _reindexed(given.element, place - given.rank, start, step)
    size = _cut_size(given.shape[place], start, end, step)
    return Value(given.dtype, (*given.shape[:place], size, *given.shape[place + 1 :]), element)


def _cut_size(size: Size, start: int, end: Any, step: int) -> Size:
    if start == 0 and step == 1 and (end is None or (isinstance(end, int) and end > _END)):
        return size
    if isinstance(size, int) and (end is None or isinstance(end, int)):
        return len(range(size)[start:end:step])
    if isinstance(end, Symbol) and start == 0 and step == 1:
        return end.name
    return None


@RULES("getitem", "__getitem__")
def _getitem(of: Operands) -> Value:
    given, where = tensor_of(of.args[0]), of.args[1]
    parts = list(where) if isinstance(where, tuple | list) else [where]
    if any(not (p is None or p is Ellipsis or isinstance(p, int | slice)) or isinstance(p, bool) for p in parts):
        raise Refuse("it is indexed in a way that is not understood")
    if Ellipsis in parts:
        missing = given.rank - sum(p is not None for p in parts) + 1
        place = parts.index(Ellipsis)
        parts[place : place + 1] = [slice(None)] * missing
    place = 0
    for part in parts:
        if isinstance(part, int):
            if part < 0:
                raise Refuse("it is indexed from the end")
            given = selected(given, place, part)
            continue
        given = unsqueezed(given, place) if part is None else sliced(given, place, part.start, part.stop, part.step)
        place += 1
    return given


# --- running over an axis ----------------------------------------------------------------------------------------


@RULES("cumsum")
def _cumsum(of: Operands) -> Value:
    given = tensor_of(of.args[0])
    axis = given.axis(argument(of, 1, "dim"))
    element = given.element
    value = int(element) if isinstance(element, bool) else element
    value = value.constant if isinstance(value, Affine) and not value.slopes else value
    if not isinstance(value, int) or of.kwargs.get("dtype") not in (None, torch.int64):
        raise Refuse("it sums up values that differ from place to place")
    return Value(torch.int64, given.shape, affine(value, {axis: value}))


@RULES("diff")
def _diff(of: Operands) -> Value:
    given, axis = tensor_of(of.args[0]), tensor_of(of.args[0]).axis(argument(of, 2, "dim", -1))
    before, after = argument(of, 3, "prepend"), argument(of, 4, "append")
    if argument(of, 1, "n", 1) != 1 or after is not None or not isinstance(given.element, Affine):
        raise Refuse("it takes differences in a way that is not understood")
    step = Affine(dict(given.element.slopes).get(axis, 0))
    shape = list(given.shape)
    if before is None:
        shape[axis] = None
    else:
        first = tensor_of(before)
        start = move_axes(given.element, {axis: None})
        if first.shape[axis] != 1 or not isinstance(first.element, Affine) or not isinstance(start, Affine):
            raise Refuse("it takes differences to a value that is not understood")
        if start.plus(first.element, -1) != step:
            raise Refuse("its first difference is unlike the others")
    return made(of.recorded, given.dtype, tuple(shape), step)


@RULES("index", "gather", "index_select")
def _index(of: Operands) -> Value:
    given = tensor_of(of.args[0])
    if _depends_on_index(given.element) or isinstance(given.element, Unknown):
        raise Refuse("it gathers values that differ from place to place")
    if of.recorded is None:
        raise Refuse("it gathers, and its sizes are not recorded")
    return replace(given, shape=recorded_shape(of.recorded))
