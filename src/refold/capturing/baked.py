"""What a graph has written into it for good: the dtype and the train/eval mode, each with the reason as words."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

_HALF_MAX = 65504.0
_MODE_ARGUMENTS = ("train", "training", "dropout_p", "use_input_stats")


def dtype_reason(graph: fx.Graph, constants: dict[str, Any]) -> str:
    """Why the floating dtype cannot change after capture; empty where nothing in the graph depends on it."""
    for name, value in constants.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return f"the constant {name} is {value.dtype}"
        if isinstance(value, nn.Module):
            return f"the nested graph {name} is not looked into"
    for node in graph.nodes:
        why = _node_dtype_reason(node) if node.op == "call_function" else ""
        if why:
            return f"node {node.name} ({node.target}) {why}"
    return ""


def _node_dtype_reason(node: fx.Node) -> str:
    found: list[str] = []

    def look(value: Any) -> Any:
        if isinstance(value, torch.dtype) and (value.is_floating_point or value.is_complex):
            found.append(f"names {value}")
        if isinstance(value, float) and abs(value) > _HALF_MAX:
            found.append(f"holds {value}, which is a limit of the captured dtype")
        return value

    map_aggregate((node.args, node.kwargs), look)
    if not found and _makes_floats(node):
        found.append("makes a floating tensor from no floating tensor")
    return found[0] if found else ""


def _makes_floats(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    sources = [n.meta.get("val") for n in node.all_input_nodes]
    return not any(s.is_floating_point() for s in sources if isinstance(s, torch.Tensor)) and not _opaque(sources)


def _opaque(sources: list[Any]) -> bool:
    return any(isinstance(s, (tuple, list)) for s in sources)


def mode_reason(graph: fx.Graph, model: nn.Module) -> str:
    """Why train() or eval() cannot be changed after capture; empty where only module calls depend on it."""
    for node in graph.nodes:
        if node.op == "call_function" and _has_mode(node):
            return f"node {node.name} ({node.target}) was recorded with this mode"
    called = {str(n.target) for n in graph.nodes if n.op == "call_module"}
    for path, module in model.named_modules():
        if path not in called and _asks_for_mode(type(module)):
            return f"{type(module).__name__} at {path or 'the root'} asks for self.training in its own code"
    return ""


def _has_mode(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(a.name in _MODE_ARGUMENTS for a in schema.arguments)


def _asks_for_mode(cls: type) -> bool:
    """Whether a method of the class (not of nn.Module) reads an attribute called ``training``."""
    own = [c for c in cls.__mro__ if c is not nn.Module and issubclass(c, nn.Module)]
    functions = [_plain_function(f) for c in own for f in vars(c).values()]
    return any(_reads(f.__code__, "training") for f in functions if f is not None)


def _plain_function(value: Any) -> types.FunctionType | None:
    value = getattr(value, "__func__", value)
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value if isinstance(value, types.FunctionType) else None


def _reads(code: types.CodeType, name: str) -> bool:
    return name in code.co_names or any(_reads(c, name) for c in code.co_consts if isinstance(c, types.CodeType))
