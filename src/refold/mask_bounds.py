"""Between which numbers the elements of a mask lie, so that none of them can be −∞.

Interval arithmetic in the dtypes that capture noted: −1e9 is a number in float32 and −∞ in float16. Whole numbers that
are an input of the model (an attention mask) count as 0 and 1, and what a layer with weights computes as at most 1e4:
like the scores, numbers of the data are taken not to overflow. An operator that is not in the table may do anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from refold.arguments import argument
from refold.constants import Constants
from refold.mask_analysis import all_written
from refold.match import GraphView, example_value, why_not_plain
from refold.no_ops import NoOp, match_no_op
from refold.purity import name_of

Bounds = tuple[float, float]
_DATA: Bounds = (-1e4, 1e4)
_LEARNED = (nn.Embedding, nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm)


class MayBeInfinite(Exception):
    """Which element of a mask may be −∞, as a sentence."""


class MaskBounds:
    """Finds the bounds of masks; what was found for a value is kept for all masks that are made from it."""

    def __init__(self, view: GraphView) -> None:
        self._view = view
        self._found: dict[Node, Bounds | str] = {}

    @cached_property
    def _written(self) -> dict[Node, Node]:
        return all_written(self._view)

    @cached_property
    def _constants(self) -> Constants:
        return Constants(self._view)

    def of(self, mask: Node) -> Bounds | str:
        """The least and the greatest number that a mask may hold, or a sentence on why it may hold −∞."""
        for node in sorted(self._needed(mask), key=self._view.position.__getitem__):
            try:
                self._found[node] = self._look(node)
            except MayBeInfinite as reason:
                self._found[node] = self._of_dtype(node) or self._of_constant(node) or str(reason)
        return self._found[mask]

    def _needed(self, mask: Node) -> set[Node]:
        pending, seen = [mask], {mask}
        while pending:
            node = pending.pop()
            inputs = [] if node in self._found or self._is_learned(node) else node.all_input_nodes
            pending += [n for n in inputs if n not in seen]
            seen |= set(inputs)
        return {n for n in seen if n not in self._found}

    def _is_learned(self, node: Node) -> bool:
        return node.op == "call_module" and type(self._view.module(str(node.target))) in _LEARNED

    # --- one value -----------------------------------------------------------------------------------------------

    def _look(self, node: Node) -> Bounds:
        noted = example_value(node)
        if node in self._written:
            writer = self._written[node].name
            raise MayBeInfinite(f"{writer} writes into {node.name}, and may put −∞ into its mask")
        if node.op == "placeholder":
            if noted is None or noted.is_floating_point():
                raise MayBeInfinite(f"its mask is made from the input {node.target}, which may hold −∞ for a whole row")
            return 0.0, 1.0
        if node.op == "get_attr":
            operand = self._view.operand(node)
            return self._of_tensor(str(node.target), None if operand is None else operand.tensor)
        if node.op == "call_module":
            return self._of_module(node)
        if noted is None and self._view.numbers(node):
            value = node.meta.get("val")
            return self._value(value) if isinstance(value, int | float) else (-(2.0**31), 2.0**31)
        apply = _RULES.get(name_of(node))
        if apply is None:
            raise MayBeInfinite(f"{node.name} may put −∞ into its mask: what {name_of(node)} makes of it is not known")
        literals = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, float)]
        low, high = apply(node, self._value) if all(map(math.isfinite, literals)) else (-math.inf, math.inf)
        if noted is not None and noted.is_floating_point():
            low, high = (float(torch.tensor(end, dtype=torch.float64).to(noted.dtype)) for end in (low, high))
        if not (math.isfinite(low) and math.isfinite(high)):
            raise MayBeInfinite(f"{node.name} puts −∞ into its mask, maybe for a whole row")
        return low, high

    def _value(self, argument: Any) -> Bounds:
        """The bounds of an operand."""
        if isinstance(argument, Node):
            found = self._found[argument]
            if isinstance(found, str):
                raise MayBeInfinite(found)
            return found
        if isinstance(argument, bool | int | float):
            return float(argument), float(argument)
        raise MayBeInfinite("its mask is made in a way that is not understood, and may hold −∞")

    def _of_tensor(self, name: str, tensor: Any) -> Bounds:
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.is_complex() or tensor.is_quantized:
            raise MayBeInfinite(f"its mask is made from {name}, which cannot be looked at")
        if tensor.numel() == 0:
            return 0.0, 0.0
        if tensor.dtype == torch.bool:
            return 0.0, 1.0
        low, high = (float(end) for end in tensor.detach().aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise MayBeInfinite(f"its mask is made from {name}, which holds −∞")
        return low, high

    def _of_module(self, node: Node) -> Bounds:
        module = self._view.module(str(node.target))
        if module is not None and type(module) in _LEARNED and why_not_plain(module, _LEARNED) is None:
            weight = getattr(module, "weight", None)
            return self._of_tensor(f"{node.target}.weight", weight) if isinstance(module, nn.Embedding) else _DATA
        if isinstance(match_no_op(self._view, node), NoOp):
            return self._value(node.args[0])
        raise MayBeInfinite(f"its mask is made by the module {node.target}, which may put −∞ into it")

    def _of_dtype(self, node: Node) -> Bounds | None:
        """Whole numbers are never infinite, wherever they come from."""
        noted = example_value(node)
        if noted is None or noted.is_floating_point() or noted.is_complex():
            return None
        if noted.dtype == torch.bool:
            return 0.0, 1.0
        return float(torch.iinfo(noted.dtype).min), float(torch.iinfo(noted.dtype).max)

    def _of_constant(self, node: Node) -> Bounds | None:
        try:
            return self._of_tensor(node.name, self._constants.value(node))
        except MayBeInfinite:
            return None


# --- operators -------------------------------------------------------------------------------------------------------

Value = Callable[[Any], Bounds]
Rule = Callable[[Node, Value], Bounds]
_RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def enter(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return enter


def _first(node: Node) -> Any:
    return argument(node, 0, "input")


def _hull(parts: Iterable[Bounds]) -> Bounds:
    lows, highs = zip(*parts, strict=True)
    return min(lows), max(highs)


def _product(a: Bounds, b: Bounds) -> Bounds:
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


@_rule("view", "reshape", "expand", "expand_as", "unsqueeze", "squeeze", "transpose", "permute", "flatten", "slice")
@_rule("select", "getitem", "index", "gather", "index_select", "narrow", "split", "chunk", "unbind", "repeat", "flip")
@_rule("repeat_interleave", "contiguous", "clone", "alias", "detach", "lift_fresh_copy", "max_pool1d")
@_rule("to", "_to_copy", "type", "type_as", "float", "half", "bfloat16", "double", "int", "long", "tensor")
@_rule("scalar_tensor")
def _same(node: Node, value: Value) -> Bounds:
    return value(_first(node))


@_rule("cat", "stack", "embedding")
def _joined(node: Node, value: Value) -> Bounds:
    """Whole numbers beside real ones are indices."""
    real = [n for n in node.all_input_nodes if (t := example_value(n)) is not None and t.is_floating_point()]
    return _hull(value(n) for n in real or node.all_input_nodes)


@_rule("tril", "triu", "relu")
def _or_zero(node: Node, value: Value) -> Bounds:
    return _hull([value(_first(node)), (0.0, 0.0)])


@_rule("full", "full_like", "new_full")
def _full(node: Node, value: Value) -> Bounds:
    return value(argument(node, 2 if name_of(node) == "new_full" else 1, "fill_value"))


@_rule("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "sigmoid", "softmax", "bool")
def _zero_to_one(node: Node, value: Value) -> Bounds:
    return 0.0, 1.0


@_rule("tanh")
def _tanh(node: Node, value: Value) -> Bounds:
    return -1.0, 1.0


@_rule("where")
def _where(node: Node, value: Value) -> Bounds:
    chosen = node.args[1:] if node.op == "call_function" and len(node.args) == 3 else [None]
    return _hull(value(n) for n in chosen)


@_rule("masked_fill")
def _masked_fill(node: Node, value: Value) -> Bounds:
    return _hull([value(_first(node)), value(argument(node, 2, "value"))])


@_rule("add", "sub")
def _sum(node: Node, value: Value) -> Bounds:
    low, high = value(_first(node))
    sign = 1 if name_of(node) == "add" else -1
    alpha = value(argument(node, 2, "alpha", 1))
    less, more = _product(_product(value(argument(node, 1, "other")), alpha), (sign, sign))
    return low + less, high + more


@_rule("rsub")
def _rsub(node: Node, value: Value) -> Bounds:
    less, more = _product(value(_first(node)), value(argument(node, 2, "alpha", 1)))
    low, high = value(argument(node, 1, "other"))
    return low - more, high - less


@_rule("mul")
def _mul(node: Node, value: Value) -> Bounds:
    return _product(value(_first(node)), value(argument(node, 1, "other")))


@_rule("div", "truediv", "true_divide")
def _div(node: Node, value: Value) -> Bounds:
    low, high = value(argument(node, 1, "other"))
    if low <= 0 <= high:
        raise MayBeInfinite(f"{node.name} may divide by 0, and so put −∞ into its mask")
    rounding = 0 if node.kwargs.get("rounding_mode") is None else 1
    low, high = _product(value(_first(node)), (1 / high, 1 / low))
    return low - rounding, high + rounding


@_rule("neg")
def _neg(node: Node, value: Value) -> Bounds:
    return _product(value(_first(node)), (-1.0, -1.0))


@_rule("minimum", "maximum", "min", "max")
def _either(node: Node, value: Value) -> Bounds:
    return _hull([value(_first(node)), value(argument(node, 1, "other"))])


@_rule("matmul", "bmm", "linear", "layer_norm", "gelu", "silu")
def _data(node: Node, value: Value) -> Bounds:
    for n in node.all_input_nodes:
        value(n)
    return _DATA
