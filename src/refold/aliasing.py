"""Which nodes write in place, and which values may share memory: what a rewrite asks before it moves or joins calls."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from refold import fx_private
from refold.known_code import is_known_function, is_known_module, only_holds

aten = torch.ops.aten

_INPLACE = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor")
_INPLACE_OPERATORS: set[Any] = {getattr(operator, name) for name in _INPLACE} | {operator.setitem}
_MODE_SWITCHES = {"_set_grad_enabled", "_enter_autocast", "_exit_autocast"}
_MODE_SWITCHES |= {"_enter_inference_mode", "_exit_inference_mode"}

# Functions and methods that return their argument, or a view of it, always or sometimes. Everything else of torch makes
# a new tensor; what is not of torch may do anything.
_MAY_RETURN_ARGUMENT = {
    "view", "reshape", "view_as", "reshape_as", "transpose", "permute", "t", "expand", "expand_as", "squeeze",
    "unsqueeze", "flatten", "unflatten", "contiguous", "to", "type", "type_as", "float", "half", "double",
    "bfloat16", "int", "long", "bool", "detach", "narrow", "select", "slice", "split", "split_with_sizes", "chunk",
    "tensor_split", "hsplit", "vsplit", "dsplit", "unbind", "swapaxes", "swapdims", "movedim", "moveaxis",
    "diagonal", "as_strided", "real", "imag", "conj", "view_as_real", "view_as_complex", "resolve_conj",
    "resolve_neg", "ravel", "cpu", "cuda", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
    "feature_dropout", "feature_alpha_dropout", "getitem", "getattr", "unfold", "broadcast_to", "broadcast_tensors",
    "atleast_1d", "atleast_2d", "atleast_3d", "adjoint", "mT", "mH", "T", "H", "data", "positive", "identity",
    "numpy", "pin_memory", "alias", "lift_fresh", "requires_grad_", "__getitem__", "values", "indices",
}  # fmt: skip
_RETURNING_MODULES: tuple[type[nn.Module], ...] = (
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
)
_RETURNING_MODULES += (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Sequential, nn.ModuleList)


def written_by(gm: GraphModule, node: Node) -> list[Node]:
    """The nodes whose values a node writes into, or may: nobody knows what functions and modules of others do."""
    first = [a for a in node.args[:1] if isinstance(a, Node)]
    if node.op == "call_method" and not hasattr(torch.Tensor, str(node.target)):
        return node.all_input_nodes
    if node.op == "call_method":
        return first if _is_inplace_name(str(node.target)) or node.target == "__setitem__" else _out(node)
    if node.op == "call_module":
        return node.all_input_nodes if _module_writes(gm, str(node.target)) else []
    if node.op != "call_function":
        return []
    if isinstance(node.target, torch._ops.OpOverload):
        return _written_by_schema(node)
    if not is_known_function(node.target) and not only_holds(node.target):
        return node.all_input_nodes
    if node.kwargs.get("inplace") is True or _is_inplace_function(node.target):
        return first or node.all_input_nodes
    return _out(node)


def _is_inplace_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


def _is_inplace_function(function: Any) -> bool:
    """By its name; but in Python's operator module a trailing underscore only keeps off a keyword: `and_`, `or_`."""
    name = getattr(function, "__name__", "").split(".")[0]
    return function in _INPLACE_OPERATORS or (_is_inplace_name(name) and getattr(operator, name, None) is not function)


def _out(node: Node) -> list[Node]:
    out = node.kwargs.get("out")
    return [n for n in (out if isinstance(out, tuple | list) else [out]) if isinstance(n, Node)]


def _module(gm: GraphModule, node: Node) -> nn.Module | None:
    try:
        return gm.get_submodule(str(node.target))
    except AttributeError:
        return None


def _module_writes(gm: GraphModule, path: str) -> bool:
    """Torch's own modules write only where they say so; of others nobody knows."""
    try:
        module = gm.get_submodule(path)
    except AttributeError:
        return True
    return not is_known_module(module) or any(getattr(m, "inplace", False) for m in module.modules())


def _written_by_schema(node: Node) -> list[Node]:
    written = fx_private.written_arguments(node.target, node.args, node.kwargs)
    flat = [x for w in written for x in (w if isinstance(w, tuple | list) else [w])]
    return [x for x in flat if isinstance(x, Node)]


def makes_fresh(gm: GraphModule, node: Node) -> bool:
    """Whether a node's value is sure to have memory of its own."""
    if node.op == "call_module":
        module = _module(gm, node)
        if module is None or not is_known_module(module) or getattr(module, "inplace", False):
            return False
        return not isinstance(module, _RETURNING_MODULES)
    if node.op == "call_method":
        name = str(node.target)
        return hasattr(torch.Tensor, name) and name not in _MAY_RETURN_ARGUMENT and not _is_inplace_name(name)
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "").split(".")[0]
    if name in _MAY_RETURN_ARGUMENT or _is_inplace_function(node.target):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return not fx_private.returns_alias(node.target)
    home = getattr(node.target, "__module__", None) or ""
    return node.kwargs.get("inplace") is not True and (home.split(".")[0] in ("torch", "_operator", "math", ""))


def memory_roots(gm: GraphModule, *nodes: Node) -> set[Node]:
    """The nodes in whose memory the values of some nodes may lie: follow everything that may return its argument."""
    pending, seen = list(nodes), set(nodes)
    while pending:
        current = pending.pop()
        for n in [] if makes_fresh(gm, current) else current.all_input_nodes:
            if n not in seen:
                seen.add(n)
                pending.append(n)
    return seen


def writes_to(gm: GraphModule, value: Node, writers: list[Node]) -> Node | None:
    """The first of some nodes that may write into a value's memory."""
    targets = [(node, target) for node in writers for target in written_by(gm, node)]
    if not targets:
        return None
    mine = memory_roots(gm, value)
    return next((node for node, target in targets if memory_roots(gm, target) & mine), None)


def switches_mode(node: Node) -> bool:
    """Whether a node switches gradients, autocast or inference mode for all that follows."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _MODE_SWITCHES
