"""Whose code a node runs. What torch and Python do is known; of the code of others nothing is: it may write into its
inputs, hand them on, look at how they lie in memory, and have any name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from refold import fx_private

_HOMES = ("torch", "_operator", "math", "builtins")
_RUNNERS = (
    "torch.autograd.function", "torch.distributed", "torch.func", "torch._functorch", "torch.jit", "torch.utils",
    "torch.ops.higher_order", "torch._higher_order_ops",
)  # fmt: skip
"""Parts of torch that run the code of others, or talk to other processes."""


def is_known_function(target: Any) -> bool:
    """Whether a function is one of torch or of Python, not of the model's author or a library of operators."""
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target).partition(".")[0] in ("aten", "prims")
    if type(target).__module__.startswith("torch._library"):  # what torch.library.custom_op makes of a function
        return False
    module = getattr(target, "__module__", None) or ""
    if not module:
        return hasattr(torch.Tensor, getattr(target, "__name__", ""))
    return module.split(".")[0] in _HOMES and not any(_lies_in(module, runner) for runner in _RUNNERS)


def _lies_in(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def is_known_module(module: nn.Module) -> bool:
    """Whether a module runs torch's code alone: it and all in it are of classes of torch, with the forward of their
    class and without hooks."""
    return all(_is_as_torch_made_it(m) for m in module.modules())


def _is_as_torch_made_it(module: nn.Module) -> bool:
    own = type(module).__module__.startswith("torch.nn.") and "forward" not in module.__dict__
    return own and not fx_private.has_hooks(module)


def only_holds(target: Any) -> bool:
    """Whether a function makes an object that holds its arguments: a class of outputs, or what capture makes it by."""
    return isinstance(target, type) or (getattr(target, "__module__", None) or "").startswith("refold.")
