"""Tensor elements as formulas of their indices, for proofs that hold for every size.

`arange(n)[None, :] <= arange(n)[:, None]` is the formula `i₋₂ − i₋₁ ≥ 0`. Indices count axes from the right, as
broadcasting does, and are at least 0. A proof evaluates a formula under an assumption with intervals: what comes out as
true is true for all indices; what is not decided stays unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Affine:
    """An integer `constant + Σ slope·index`; `slopes` holds (axis from the right, slope), sorted, no zeros."""

    constant: int
    slopes: tuple[tuple[int, int], ...] = ()

    def plus(self, other: Affine, factor: int = 1) -> Affine:
        """`self + factor·other`."""
        slopes = dict(self.slopes)
        for axis, slope in other.slopes:
            slopes[axis] = slopes.get(axis, 0) + factor * slope
        return affine(self.constant + factor * other.constant, slopes)


def affine(constant: int, slopes: Mapping[int, int]) -> Affine:
    """An affine expression in its one normal form."""
    return Affine(constant, tuple(sorted((axis, slope) for axis, slope in slopes.items() if slope)))


@dataclass(frozen=True)
class Number:
    """A number that is not an integer of index arithmetic, in the dtype of its tensor."""

    value: float


@dataclass(frozen=True)
class AtLeastZero:
    """`expression ≥ 0`."""

    expression: Affine


@dataclass(frozen=True)
class Not:
    """Logical negation."""

    inner: Formula


@dataclass(frozen=True)
class And:
    """Logical conjunction."""

    left: Formula
    right: Formula


@dataclass(frozen=True)
class Choice:
    """One of two elements, by a condition."""

    condition: Formula
    then: Element
    other: Element


@dataclass(frozen=True)
class Unknown:
    """An element that nothing is known about, and why, as a sentence."""

    reason: str


Formula = bool | AtLeastZero | Not | And
Element = Affine | Number | Formula | Choice | Unknown


# --- building formulas -------------------------------------------------------------------------------------------


def negate(formula: Formula) -> Formula:
    """¬a."""
    if isinstance(formula, bool):
        return not formula
    return formula.inner if isinstance(formula, Not) else Not(formula)


def conjoin(a: Formula, b: Formula) -> Formula:
    """a ∧ b."""
    if isinstance(a, bool):
        return b if a else False
    if isinstance(b, bool):
        return a if b else False
    return a if a == b else And(a, b)


def disjoin(a: Formula, b: Formula) -> Formula:
    """a ∨ b."""
    return negate(conjoin(negate(a), negate(b)))


def at_least(a: Affine, b: Affine) -> Formula:
    """a ≥ b."""
    difference = a.plus(b, -1)
    return AtLeastZero(difference) if difference.slopes else difference.constant >= 0


def equal(a: Affine, b: Affine) -> Formula:
    """a = b."""
    return conjoin(at_least(a, b), at_least(b, a))


def choose(condition: Formula, then: Element, other: Element) -> Element:
    """`then` where the condition holds, else `other`."""
    if isinstance(condition, bool):
        return then if condition else other
    if then == other and not isinstance(then, Unknown):
        return then
    if is_formula(then) and is_formula(other):
        return disjoin(conjoin(condition, then), conjoin(negate(condition), other))  # type: ignore[arg-type]
    return Choice(condition, then, other)


def is_formula(element: Element) -> bool:
    """Whether an element is a truth value."""
    return isinstance(element, bool | AtLeastZero | Not | And)


def map_leaves(element: Element, change: Callable[[Element], Element]) -> Element:
    """Apply a function to what an element may turn out to be."""
    if isinstance(element, Choice):
        return choose(element.condition, map_leaves(element.then, change), map_leaves(element.other, change))
    return change(element)


def substitute(element: Element, replace: Callable[[Affine], Affine]) -> Element:
    """The same element with other index expressions."""
    if isinstance(element, Affine):
        return replace(element)
    if isinstance(element, AtLeastZero):
        return at_least(replace(element.expression), Affine(0))
    if isinstance(element, Not):
        return negate(substitute(element.inner, replace))  # type: ignore[arg-type]
    if isinstance(element, And):
        return conjoin(substitute(element.left, replace), substitute(element.right, replace))  # type: ignore[arg-type]
    if isinstance(element, Choice):
        condition = substitute(element.condition, replace)
        return choose(condition, substitute(element.then, replace), substitute(element.other, replace))  # type: ignore[arg-type]
    return element


def move_axes(element: Element, where: Mapping[int, int | None]) -> Element:
    """Rename axes; an axis that goes to None has size 1, so its index is 0."""

    def moved(expression: Affine) -> Affine:
        slopes: dict[int, int] = {}
        for axis, slope in expression.slopes:
            new = where.get(axis, axis)
            if new is not None:
                slopes[new] = slopes.get(new, 0) + slope
        return affine(expression.constant, slopes)

    return substitute(element, moved)


# --- deciding ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assumption:
    """What is taken for granted: sizes of axes where known, and how an affine expression reads in free variables."""

    sizes: Mapping[int, int]
    relation: str = "any"
    """'any'; 'seen' (key ≤ query: i₋₂ = i₋₁ + t) or 'ahead' (key > query: i₋₁ = i₋₂ + 1 + t), with t ≥ 0."""

    def bounds(self, expression: Affine) -> tuple[float, float]:
        """The least and the greatest value that an expression can take."""
        slopes = dict(expression.slopes)
        low = high = float(expression.constant)
        sizes = dict(self.sizes)  # the free variable t stands as axis 0
        if self.relation == "seen":
            slopes[0] = slopes.pop(-2, 0)
            slopes[-1] = slopes.get(-1, 0) + slopes[0]
            sizes |= {0: sizes[-2]} if -2 in sizes else {}
        elif self.relation == "ahead":
            slopes[0] = slopes.pop(-1, 0)
            slopes[-2] = slopes.get(-2, 0) + slopes[0]
            low, high = low + slopes[0], high + slopes[0]
            sizes |= {0: sizes[-1] - 1} if -1 in sizes else {}
        for variable, slope in slopes.items():
            if slope:
                most = slope * max(sizes[variable] - 1, 0) if variable in sizes else math.copysign(math.inf, slope)
                low, high = low + min(0, most), high + max(0, most)
        return low, high

    def decide(self, formula: Formula) -> bool | None:
        """Whether a formula holds for all indices (True), for none (False), or neither is proven (None)."""
        if isinstance(formula, bool):
            return formula
        if isinstance(formula, Not):
            inner = self.decide(formula.inner)
            return None if inner is None else not inner
        if isinstance(formula, And):
            left, right = self.decide(formula.left), self.decide(formula.right)
            if left is False or right is False:
                return False
            return True if left and right else None
        low, high = self.bounds(formula.expression)
        return True if low >= 0 else False if high < 0 else None

    def value(self, element: Element) -> bool | float | None:
        """The one value that an element has under this assumption, where it is proven."""
        if isinstance(element, Choice):
            chosen = self.decide(element.condition)
            return None if chosen is None else self.value(element.then if chosen else element.other)
        if isinstance(element, Number):
            return element.value
        if isinstance(element, Affine):
            return None if element.slopes else element.constant
        return None if isinstance(element, Unknown) else self.decide(element)


def why_unknown(element: Element) -> str | None:
    """The first reason for which an element is not known."""
    if isinstance(element, Unknown):
        return element.reason
    return why_unknown(element.then) or why_unknown(element.other) if isinstance(element, Choice) else None


# --- recognising constants ---------------------------------------------------------------------------------------


def recognise(tensor: torch.Tensor) -> Element:
    """A formula for a tensor's elements that holds for every one of them."""
    if tensor.numel() == 0 or tensor.is_complex() or tensor.is_quantized:
        return Unknown("its values follow no pattern that is known")
    plain = tensor.detach().cpu()
    first = plain.reshape(-1)[0]
    if bool((plain == first).all()):
        return scalar_element(first)
    return _triangle(plain) or _progression(plain) or Unknown("its values follow no pattern that is known")


def scalar_element(value: torch.Tensor) -> Element:
    """The element of a tensor that holds one value."""
    if value.dtype == torch.bool:
        return bool(value.item())
    return Number(float(value.item())) if value.is_floating_point() else Affine(int(value.item()))


def _triangle(tensor: torch.Tensor) -> Element | None:
    """One value on and below the diagonal, another above."""
    if tensor.dim() < 2 or tensor.shape[-1] < 2:
        return None
    seen, ahead = tensor.reshape(-1, *tensor.shape[-2:])[0, 0, :2]
    lower = torch.ones(tensor.shape[-2:], dtype=torch.bool).tril()
    if not torch.equal(tensor, torch.where(lower, seen, ahead).expand_as(tensor)):
        return None
    return choose(AtLeastZero(affine(0, {-2: 1, -1: -1})), scalar_element(seen), scalar_element(ahead))


def _progression(tensor: torch.Tensor) -> Element | None:
    """Integers that grow evenly along one axis and are the same along all others."""
    if tensor.dtype not in (torch.int64, torch.int32):
        return None
    tensor = tensor.to(torch.int64)
    origin = tensor.reshape(-1)[0]
    for axis in range(tensor.dim()):
        if tensor.shape[axis] < 2:
            continue
        step = tensor.movedim(axis, 0).reshape(tensor.shape[axis], -1)[1, 0] - origin
        shape = [-1 if a == axis else 1 for a in range(tensor.dim())]
        line = (origin + step * torch.arange(tensor.shape[axis], dtype=tensor.dtype)).reshape(shape)
        if torch.equal(tensor, line.expand_as(tensor)):
            return affine(int(origin), {axis - tensor.dim(): int(step)})
    return None
