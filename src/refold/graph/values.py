"""What capture recorded about the value of a node: an example, its sizes, and whether it is a number."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten


def example_value(node: Any) -> torch.Tensor | None:
    """The (fake) tensor that capture recorded for a node, if any."""
    value = node.meta.get("val", node.meta.get("example_value")) if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def proves_shapes(recorded: torch.Tensor) -> bool:
    """Whether recorded sizes hold for every run: an export guards them, an example that was run through does not."""
    mode = getattr(recorded, "fake_mode", None)
    return mode is not None and mode.shape_env is not None


def rank_of(node: Any) -> int | None:
    """The number of dimensions of a node's value, where it was recorded."""
    value = example_value(node)
    if value is not None:
        return value.dim()
    shape = getattr(node.meta.get("tensor_meta"), "shape", None) if isinstance(node, Node) else None
    return None if shape is None else len(shape)


_NUMBER_METHODS = {
    "size", "dim", "ndimension", "numel", "nelement", "item", "tolist", "stride", "__len__", "element_size",
}  # fmt: skip
_NUMBER_ATTRIBUTES = {"shape", "ndim", "nbytes", "itemsize"}
_ARITHMETIC = {
    getattr(operator, n) for n in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "getitem")
}
_NUMBER_FUNCTIONS: set[Any] = {len, int, float, round, max, min, torch.numel, aten.sym_size.int, aten.sym_numel.default}


def is_number(node: Node, depth: int = 0) -> bool:
    """Whether a value is certainly a Python number (a size), not a tensor; `depth` ends the search."""
    value = node.meta.get("val", node.meta.get("example_value"))
    if value is not None:
        return isinstance(value, int | float | torch.SymInt | torch.SymFloat | torch.SymBool)
    if node.type in (int, float):
        return True
    if node.op == "call_method":
        return node.target in _NUMBER_METHODS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in _NUMBER_ATTRIBUTES
    if node.target in _NUMBER_FUNCTIONS or getattr(node.target, "__module__", "") == "math":
        return True
    inputs = node.all_input_nodes
    return node.target in _ARITHMETIC and bool(inputs) and depth < 20 and all(is_number(n, depth + 1) for n in inputs)


def count_elements(tensor: torch.Tensor) -> int:
    """The number of elements; 0 where a size is symbolic."""
    return torch.Size(tensor.shape).numel() if all(isinstance(size, int) for size in tensor.shape) else 0


def same_size(a: Any, b: Any) -> bool:
    """Whether two recorded sizes are surely equal: the same number, or the same symbolic expression."""
    return str(a) == str(b)


def same_sizes(a: Any, b: Any) -> bool:
    """Whether two recorded shapes are surely equal."""
    return len(a) == len(b) and all(map(same_size, a, b))


def size_of(node: Node, dim: int) -> Any:
    """A recorded size of a node's value; None where none was recorded."""
    value = example_value(node)
    return value.shape[dim] if value is not None and -value.dim() <= dim < value.dim() else None
