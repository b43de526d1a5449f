"""Between which numbers the elements of a mask lie, so that none of them can be −∞.

Interval arithmetic in the recorded dtypes: −1e9 is a number in float32 and −∞ in float16. Whole numbers that are an
input of the model (an attention mask) count as 0 and 1, and what a layer with weights computes as at most 1e4: like the
scores, numbers of the data are taken not to overflow. An operator that is not in the table may do anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from refold.graph.arguments import argument
from refold.graph.constants import Constants
from refold.graph.targets import name_of
from refold.graph.values import example_value, is_number
from refold.graph.view import GraphView
from refold.patterns.no_ops import NoOp, match_no_op
from refold.patterns.rule_table import RuleTable
from refold.rewrite.refusal import Refuse, attempt, holds, plain

Bounds = tuple[float, float]
_DATA: Bounds = (-1e4, 1e4)
_LEARNED = (nn.Embedding, nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm)


class MaskBounds:
    """Finds the bounds of masks; what was found for a value is kept for all masks that are made from it."""

    def __init__(self, view: GraphView) -> None:
        self._view = view
        self._found: dict[Node, Bounds | Refuse] = {}

    def of(self, mask: Node) -> Bounds:
        """The least and the greatest number that a mask may hold; refuses one that may hold −∞."""
        for node in self._view.needed_for(mask, self._found, self._is_learned):
            found = attempt(self._look, node)
            if isinstance(found, Refuse):
                found = self._of_dtype(node) or self._of_constant(node) or found
            self._found[node] = found
        return self._value(mask)

    def _is_learned(self, node: Node) -> bool:
        return node.op == "call_module" and type(self._view.module(str(node.target))) in _LEARNED

    # --- one value -----------------------------------------------------------------------------------------------

    def _look(self, node: Node) -> Bounds:
        recorded = example_value(node)
        if node in self._view.written:
            writer = self._view.written[node].name
            raise Refuse(f"{writer} writes into {node.name}, and may put −∞ into its mask")
        if node.op == "placeholder":
            if recorded is None or recorded.is_floating_point():
                raise Refuse(f"its mask is made from the input {node.target}, which may hold −∞ for a whole row")
            return 0.0, 1.0
        if node.op == "get_attr":
            operand = self._view.operand(node)
            return self._of_tensor(str(node.target), None if operand is None else operand.tensor)
        if node.op == "call_module":
            return self._of_module(node)
        if recorded is None and is_number(node):
            value = node.meta.get("val")
            return self._value(value) if isinstance(value, int | float) else (-(2.0**31), 2.0**31)
        apply = _RULES.of(node)
        if apply is None:
            raise Refuse(f"{node.name} may put −∞ into its mask: what {name_of(node)} makes of it is not known")
        literals = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, float)]
        low, high = apply(node, self._value) if all(map(math.isfinite, literals)) else (-math.inf, math.inf)
        if recorded is not None and recorded.is_floating_point():
            low, high = (float(torch.tensor(end, dtype=torch.float64).to(recorded.dtype)) for end in (low, high))
        if not (math.isfinite(low) and math.isfinite(high)):
            raise Refuse(f"{node.name} puts −∞ into its mask, maybe for a whole row")
        return low, high

    def _value(self, argument: Any) -> Bounds:
        """The bounds of an operand."""
        if isinstance(argument, Node):
            found = self._found[argument]
            if isinstance(found, Refuse):
                raise Refuse(found.reason)
            return found
        if isinstance(argument, bool | int | float):
            return float(argument), float(argument)
        raise Refuse("its mask is made in a way that is not understood, and may hold −∞")

    def _of_tensor(self, name: str, tensor: Any) -> Bounds:
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.is_complex() or tensor.is_quantized:
            raise Refuse(f"its mask is made from {name}, which cannot be evaluated")
        if tensor.numel() == 0:
            return 0.0, 0.0
        if tensor.dtype == torch.bool:
            return 0.0, 1.0
        low, high = (float(end) for end in tensor.detach().aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise Refuse(f"its mask is made from {name}, which holds −∞")
        return low, high

    def _of_module(self, node: Node) -> Bounds:
        module = self._view.module(str(node.target))
        if module is not None and type(module) in _LEARNED and holds(plain, module, _LEARNED):
            weight = getattr(module, "weight", None)
            return self._of_tensor(f"{node.target}.weight", weight) if isinstance(module, nn.Embedding) else _DATA
        if isinstance(attempt(match_no_op, self._view, node), NoOp):
            return self._value(node.args[0])
        raise Refuse(f"its mask is made by the module {node.target}, which may put −∞ into it")

    def _of_dtype(self, node: Node) -> Bounds | None:
        """Whole numbers are never infinite, wherever they come from."""
        recorded = example_value(node)
        if recorded is None or recorded.is_floating_point() or recorded.is_complex():
            return None
        if recorded.dtype == torch.bool:
            return 0.0, 1.0
        return float(torch.iinfo(recorded.dtype).min), float(torch.iinfo(recorded.dtype).max)

    def _of_constant(self, node: Node) -> Bounds | None:
        found = attempt(self._of_tensor, node.name, self._view.analysis(Constants).value(node))
        return None if isinstance(found, Refuse) else found


# --- operators -------------------------------------------------------------------------------------------------------

Value = Callable[[Any], Bounds]
_RULES: RuleTable[Callable[[Node, Value], Bounds]] = RuleTable()


def _first(node: Node) -> Any:
    return argument(node, 0, "input")


def _hull(parts: Iterable[Bounds]) -> Bounds:
    lows, highs = zip(*parts, strict=True)
    return min(lows), max(highs)


@_RULES("cat", "stack", "embedding")
def _joined(node: Node, value: Value) -> Bounds:
    """Whole numbers among real ones are indices."""
    real = [n for n in node.all_input_nodes if (t := example_value(n)) is not None and t.is_floating_point()]
    return _hull(value(n) for n in real or node.all_input_nodes)


@_RULES("tril", "triu", "relu")
def _or_zero(node: Node, value: Value) -> Bounds:
    return _hull([value(_first(node)), (0.0, 0.0)])


_FIXED: dict[str, Bounds] = {"tanh": (-1.0, 1.0)}
_FIXED |= dict.fromkeys(("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones"), (0.0, 1.0))
_FIXED |= dict.fromkeys(("sigmoid", "softmax", "bool"), (0.0, 1.0))


@_RULES(*_FIXED)
def _fixed(node: Node, value: Value) -> Bounds:
    return _FIXED[name_of(node)]


_HANDED_ON = (
    "view", "reshape", "expand", "expand_as", "unsqueeze", "squeeze", "transpose", "permute", "flatten", "slice",
    "select", "getitem", "index", "gather", "index_select", "narrow", "split", "chunk", "unbind", "repeat", "flip",
    "repeat_interleave", "contiguous", "clone", "alias", "detach", "lift_fresh_copy", "max_pool1d", "to", "_to_copy",
    "type", "type_as", "float", "half", "bfloat16", "double", "int", "long", "tensor", "scalar_tensor",
)  # fmt: skip
_CHOICES: dict[str, tuple[tuple[int, str], ...]] = dict.fromkeys(_HANDED_ON, ((0, "input"),))
_CHOICES |= dict.fromkeys(("minimum", "maximum", "min", "max"), ((0, "input"), (1, "other")))
_CHOICES |= {"masked_fill": ((0, "input"), (2, "value")), "new_full": ((2, "fill_value"),)}
_CHOICES |= dict.fromkeys(("full", "full_like"), ((1, "fill_value"),))
"""Which arguments, by index and name, the elements of a result are taken from."""


@_RULES(*_CHOICES)
def _chosen(node: Node, value: Value) -> Bounds:
    return _hull(value(argument(node, index, name)) for index, name in _CHOICES[name_of(node)])


@_RULES("where")
def _where(node: Node, value: Value) -> Bounds:
    chosen = node.args[1:] if node.op == "call_function" and len(node.args) == 3 else [None]
    return _hull(value(n) for n in chosen)


_LINEAR: dict[str, Callable[[float, float, float], float]] = {
    "add": lambda a, b, alpha: a + b * alpha,
    "sub": lambda a, b, alpha: a - b * alpha,
    "rsub": lambda a, b, alpha: b - a * alpha,
    "mul": lambda a, b, alpha: a * b,
    "neg": lambda a, b, alpha: -a,
}


@_RULES(*_LINEAR)
def _linear(node: Node, value: Value) -> Bounds:
    """What is linear in each operand is least and greatest at ends of theirs."""
    a, b, alpha = value(_first(node)), value(argument(node, 1, "other", 0)), value(argument(node, 2, "alpha", 1))
    ends = [_LINEAR[name_of(node)](*end) for end in product(a, b, alpha)]
    return min(ends), max(ends)


@_RULES("div", "truediv", "true_divide")
def _div(node: Node, value: Value) -> Bounds:
    low, high = value(argument(node, 1, "other"))
    if low <= 0 <= high:
        raise Refuse(f"{node.name} may divide by 0, and so put −∞ into its mask")
    rounding = 0 if node.kwargs.get("rounding_mode") is None else 1
    ends = [a / b for a, b in product(value(_first(node)), (low, high))]
    return min(ends) - rounding, max(ends) + rounding


@_RULES("matmul", "bmm", "linear", "layer_norm", "gelu", "silu")
def _data(node: Node, value: Value) -> Bounds:
    for n in node.all_input_nodes:
        value(n)
    return _DATA
