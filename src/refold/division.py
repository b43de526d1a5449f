"""Division of a tensor by a constant, however it is written: operator, function, method or ATen operator."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from refold.match import GraphView

aten = torch.ops.aten


@dataclass(frozen=True)
class Division:
    """`numerator / divisor` with a constant divisor; `product` is what multiplies in the same manner."""

    node: Node
    numerator: Node
    divisor: int | float
    product: Callable[..., Any] | str


_PRODUCTS: dict[Any, Any] = {
    operator.truediv: operator.mul,
    operator.itruediv: operator.imul,
    torch.div: torch.mul,
    torch.divide: torch.mul,
    torch.true_divide: torch.mul,
    torch.Tensor.div: torch.Tensor.mul,
    torch.Tensor.true_divide: torch.Tensor.mul,
    "div": "mul",
    "divide": "mul",
    "true_divide": "mul",
    "div_": "mul_",
    "divide_": "mul_",
    "true_divide_": "mul_",
    "__truediv__": "__mul__",
    aten.div.Tensor: aten.mul.Tensor,
    aten.div.Scalar: aten.mul.Scalar,
    aten.true_divide.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.mul_.Tensor,
    aten.div_.Scalar: aten.mul_.Scalar,
}
_ROUNDING: set[Any] = {
    aten.div.Tensor_mode,
    aten.div.Scalar_mode,
    torch.floor_divide,
    operator.floordiv,
    "floor_divide",
}


def match_division(view: GraphView, node: Node) -> Division | str | None:
    """A true division of a tensor by a Python number."""
    if node.op not in ("call_function", "call_method"):
        return None
    if node.target in _ROUNDING:
        return "it rounds its quotient"
    if node.target not in _PRODUCTS:
        return None
    given = dict(node.kwargs)
    values = [*node.args, *(given.pop(k) for k in ("other", "value") if k in given)]
    if given.pop("rounding_mode", None) is not None:
        return "it rounds its quotient"
    if given or len(values) != 2:
        return "its arguments are not understood"
    numerator, divisor = values
    if not isinstance(numerator, Node):
        return "a number is divided by a tensor, not the other way round"
    if isinstance(divisor, bool) or not isinstance(divisor, int | float):
        return "its divisor is not a constant"
    if view.numbers(numerator):
        return "it divides Python numbers (sizes), where rounding matters"
    return Division(node, numerator, divisor, _PRODUCTS[node.target])
