"""What a graph is specialised to: its dtype, its train/eval mode, and values of inputs that control flow depends on."""

from __future__ import annotations

import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from refold.capture.size_rules import InputRule

_HALF_MAX = 65504.0
_MODE_ARGUMENTS = ("train", "training", "dropout_p", "use_input_stats")


def dtype_reason(graph: fx.Graph, constants: dict[str, Any]) -> str:
    """Why the floating dtype cannot change after capture; empty where nothing in the graph depends on it."""
    for name, value in constants.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return f"the constant {name} is {value.dtype}"
        if isinstance(value, nn.Module):
            return f"the nested graph {name} is not inspected"
    for node in graph.nodes:
        why = _node_dtype_reason(node) if node.op == "call_function" else ""
        if why:
            return f"node {node.name} ({node.target}) {why}"
    return ""


def _node_dtype_reason(node: fx.Node) -> str:
    for value in tree_leaves((node.args, node.kwargs)):
        if isinstance(value, torch.dtype) and (value.is_floating_point or value.is_complex):
            return f"names {value}"
        if isinstance(value, float) and abs(value) > _HALF_MAX:
            return f"holds {value}, which is a limit of the captured dtype"
    return "makes a floating tensor from no floating tensor" if _makes_floats(node) else ""


def _makes_floats(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    sources = [n.meta.get("val") for n in node.all_input_nodes]
    is_opaque = any(isinstance(s, (tuple, list)) for s in sources)
    return not is_opaque and not any(s.is_floating_point() for s in sources if isinstance(s, torch.Tensor))


def mode_reason(graph: fx.Graph, model: nn.Module) -> str:
    """Why train() or eval() cannot be changed after capture; empty where only module calls depend on it."""
    for node in graph.nodes:
        if node.op == "call_function" and _has_mode(node):
            return f"node {node.name} ({node.target}) was recorded with this mode"
    called = {str(n.target) for n in graph.nodes if n.op == "call_module"}
    for path, module in model.named_modules():
        if path not in called and _reads_mode(type(module)):
            return f"{type(module).__name__} at {path or 'the root'} reads self.training in its own code"
    return ""


def _has_mode(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(a.name in _MODE_ARGUMENTS for a in schema.arguments)


def _reads_mode(cls: type) -> bool:
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


class FixedValues:
    """The values at capture of inputs that control flow depends on, by the index of the input. A tensor on a GPU that
    was compared is not compared again."""

    def __init__(self, values: Mapping[int, torch.Tensor]) -> None:
        self.values = values
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def complaint(self, tensors: Sequence[Any], inputs: Sequence[InputRule]) -> str:
        """Which input has other values, as words; empty where all are as they were."""
        for index, value in self.values.items():
            if not self._is(tensors[index], index, value):
                was = value.tolist() if value.numel() <= 32 else f"another tensor of shape {tuple(value.shape)}"
                return f"the model's control flow depends on {inputs[index].name}, which was {was} at capture"
        return ""

    def _is(self, tensor: Any, index: int, value: torch.Tensor) -> bool:
        if not isinstance(tensor, torch.Tensor):
            return False
        if tensor.device.type == "cpu" or tensor.is_inference():
            return torch.equal(tensor.to(value.device), value)
        # comparing waits for a GPU and cannot be done inside a CUDA graph, so the same tensor is not compared again
        seen, version = self._seen.get(index, (None, -1))
        if seen is not None and seen() is tensor and version == tensor._version:
            return True
        if not torch.equal(tensor.to(value.device), value):
            return False
        self._seen[index] = (weakref.ref(tensor), tensor._version)
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return FixedValues, (self.values,)
