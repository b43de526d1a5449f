"""ATen calls as the Python operators, torch functions and methods that people write, where both mean exactly the same.

Passes that were written for the symbolic tracer look for `operator.mul`, `torch.matmul` or a call of the method `view`.
A row of the table says which of them an ATen overload is, with the same arguments in the same order: run under
`torch.export`, the new call gives the very ATen call that it was made from, and the tests hold every row to that.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

aten = torch.ops.aten
Target = Callable[..., Any] | str

_OPERATORS: dict[str, Callable[..., Any]] = {
    "add.Tensor": operator.add,
    "sub.Tensor": operator.sub,
    "mul.Tensor": operator.mul,
    "div.Tensor": operator.truediv,
    "floor_divide.default": operator.floordiv,
    "remainder.Tensor": operator.mod,
    "remainder.Scalar": operator.mod,
    "pow.Tensor_Scalar": operator.pow,
    "pow.Tensor_Tensor": operator.pow,
    "neg.default": operator.neg,
    "bitwise_not.default": operator.invert,
    "__and__.Tensor": operator.and_,
    "__or__.Tensor": operator.or_,
    "__xor__.Tensor": operator.xor,
}
_OPERATORS |= {
    f"{name}.{kind}": getattr(operator, name)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for kind in ("Tensor", "Scalar")
}

_FUNCTIONS = [
    "abs.default",
    "argmax.default",
    "bmm.default",
    "cat.default",
    "clamp.default",
    "cos.default",
    "cumsum.default",
    "einsum.default",
    "embedding.default",
    "erf.default",
    "exp.default",
    "gather.default",
    "log.default",
    "logical_not.default",
    "matmul.default",
    "mean.dim",
    "mm.default",
    "relu.default",
    "rsqrt.default",
    "sigmoid.default",
    "sin.default",
    "softmax.int",
    "sqrt.default",
    "stack.default",
    "sum.dim_IntList",
    "tanh.default",
    "tril.default",
    "triu.default",
    "where.self",
]

_NN_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "gelu.default": F.gelu,
    "linear.default": F.linear,
    "scaled_dot_product_attention.default": F.scaled_dot_product_attention,
    "silu.default": F.silu,
}

_METHODS = [
    "clone.default",
    "contiguous.default",
    "expand.default",
    "flatten.using_ints",
    "masked_fill.Scalar",
    "masked_fill.Tensor",
    "permute.default",
    "repeat.default",
    "reshape.default",
    "squeeze.dim",
    "to.dtype",
    "transpose.int",
    "unsqueeze.default",
    "view.default",
]


def _overload(name: str) -> Any:
    packet, _, kind = name.partition(".")
    return getattr(getattr(aten, packet), kind)


TABLE: dict[Any, Target] = {_overload(name): target for name, target in {**_OPERATORS, **_NN_FUNCTIONS}.items()}
TABLE |= {_overload(name): getattr(torch, name.partition(".")[0]) for name in _FUNCTIONS}
TABLE |= {_overload(name): name.partition(".")[0] for name in _METHODS}
TABLE[aten.sym_size.int] = "size"
"""What each ATen overload is called in Python: a function, or the name of a method."""


def use_python_operators(gm: GraphModule) -> None:
    """Write the calls of a captured graph as Python operators, torch functions and methods, wherever there is one that
    means exactly the same."""
    for node in gm.graph.nodes:
        target = python_target(node)
        if target is not None:
            node.op = "call_method" if isinstance(target, str) else "call_function"
            node.target = target
    gm.recompile()


def python_target(node: Node) -> Target | None:
    """What a node calls in Python; None where there is nothing that means the same with the same arguments."""
    target = TABLE.get(node.target) if node.op == "call_function" else None
    if target is None or not node.args or not _is_tensor(node.args[0], target):
        return None
    by_position = target in _OPERATORS.values()
    return None if by_position and node.kwargs else target


def _is_tensor(value: Any, target: Target) -> bool:
    """Whether the first argument is a tensor, whose class decides what an operator or a method means; functions that
    take a list of tensors are the only others."""
    if isinstance(value, Node):
        return isinstance(value.meta.get("val"), torch.Tensor)
    return target in (torch.cat, torch.stack) or target is torch.einsum
