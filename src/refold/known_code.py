"""Whose code a node runs. What torch and Python do is known; of the code of others nothing is: it may write into its
inputs, hand them on, look at how they lie in memory, and have any name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_HOMES = ("torch", "_operator", "math", "builtins")


def is_known_function(target: Any) -> bool:
    """Whether a function is one of torch or of Python, not of the model's author or a library of operators."""
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target).partition(".")[0] in ("aten", "prims")
    if type(target).__module__.startswith("torch._library"):  # what torch.library.custom_op makes of a function
        return False
    home = (getattr(target, "__module__", None) or "").split(".")[0]
    return home in _HOMES or (not home and hasattr(torch.Tensor, getattr(target, "__name__", "")))


def is_known_module(module: nn.Module) -> bool:
    """Whether a module is of a class of torch."""
    return type(module).__module__.startswith("torch.nn.")


def only_holds(target: Any) -> bool:
    """Whether a function makes an object that holds its arguments: a class of outputs, or what capture makes it by."""
    return isinstance(target, type) or (getattr(target, "__module__", None) or "").startswith("refold.")
