"""Whether running a node changes anything but its result: a write, or a step of the random generator."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_PURE_MODULES = ("_operator", "math", "builtins", "torch", "sympy")


def has_effect(node: fx.Node) -> bool:
    """True for ops that write into an argument or draw random numbers, and for functions nothing is known about."""
    if node.op != "call_function":
        return node.op in ("call_module", "call_method")
    target: Any = node.target
    if isinstance(target, type):
        return False
    schema = getattr(target, "_schema", None)
    if schema is None:
        return not (getattr(target, "__module__", None) or "").startswith(_PURE_MODULES)
    return schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags
