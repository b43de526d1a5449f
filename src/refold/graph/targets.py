"""What a node calls, and whose code that is. What torch and Python do is known; other code may write into its inputs,
return them, depend on how they lie in memory, and have any name."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from refold import fx_private

_HOMES = ("torch", "_operator", "math", "builtins")
_RUNNERS = (
    "torch.autograd.function.", "torch.distributed.", "torch.func.", "torch._functorch.", "torch.jit.", "torch.utils.",
    "torch.ops.higher_order.", "torch._higher_order_ops.",
)  # fmt: skip
"""Parts of torch that run code of the model's author, or communicate with other processes."""


def find_module(root: nn.Module, path: str) -> nn.Module | None:
    """The module at a path; None where there is none."""
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def is_known_function(target: Any) -> bool:
    """Whether a function is one of torch or of Python, not of the model's author or a library of operators."""
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target).partition(".")[0] in ("aten", "prims", "refold")
    if type(target).__module__.startswith("torch._library"):  # what torch.library.custom_op makes of a function
        return False
    module = getattr(target, "__module__", None) or ""
    if not module:
        return hasattr(torch.Tensor, getattr(target, "__name__", ""))
    return module.split(".")[0] in _HOMES and not f"{module}.".startswith(_RUNNERS)


def is_known_module(module: nn.Module) -> bool:
    """Whether a module runs torch's code alone: it and all in it are of classes of torch, with the forward of their
    class and without hooks."""
    return all(_is_as_torch_made_it(m) for m in module.modules())


def _is_as_torch_made_it(module: nn.Module) -> bool:
    own = type(module).__module__.startswith("torch.nn.") and "forward" not in module.__dict__
    return own and not fx_private.has_hooks(module)


def runs_unknown_code(gm: nn.Module, node: Node) -> bool:
    """Whether a node runs code that is not torch's: it may view its input, or trust that it is contiguous."""
    if node.op == "call_module":
        return not is_known_module(gm.get_submodule(str(node.target)))
    return node.op == "call_function" and not is_known_function(node.target)


def only_holds(target: Any) -> bool:
    """Whether a function makes an object that holds its arguments: a class of outputs, or what capture makes it by."""
    return isinstance(target, type) or (getattr(target, "__module__", None) or "").startswith("refold.")


def called_name(node: Node) -> str:
    """The bare name of the function or method that a node calls; modules, whatever their names, have none."""
    return name_of(node) if node.op in ("call_function", "call_method") else ""


_OPERATOR_NAMES: dict[Any, str] = {operator.and_: "__and__", operator.or_: "__or__", operator.xor: "__xor__"}
"""Python operators whose ATen calls have other names."""


def name_of(node: Node) -> str:
    """The bare name of what a node calls: 'add' for `aten.add.Tensor`, `torch.add` and the method. Unknown code has its
    full name, so that `mylib.add` is not taken for it, nor a module or an input that is called `add`."""
    target: Any = node.target
    if isinstance(target, str):
        return target if node.op == "call_method" else f"{node.op} {target}"
    if not is_known_function(target):
        return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"
    if isinstance(target, torch._ops.OpOverload):
        return str(target).split(".")[1]
    return _OPERATOR_NAMES.get(target) or getattr(target, "__name__", "").split(".")[0]
