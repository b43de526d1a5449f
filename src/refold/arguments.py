"""The arguments of a call by their names, however they were given."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch.fx import Node


def named_arguments(node: Node) -> dict[str, Any]:
    """What a call of a function is given, and the defaults of the rest; of a function that does not tell its signature
    the keywords alone."""
    names, defaults = _signature(node.target)
    return defaults | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    """One argument of a call, by its place or by its name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


@cache
def _signature(target: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of the places, and the defaults. Torch's builtin functions have the places of their operator."""
    if not isinstance(target, torch._ops.OpOverload):
        try:
            parameters = inspect.signature(target).parameters.values()
        except (TypeError, ValueError):
            target = getattr(getattr(torch.ops.aten, getattr(target, "__name__", ""), None), "default", None)
            return _signature(target) if target is not None else ((), {})
        places = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
        return places, {p.name: p.default for p in parameters if p.default is not p.empty}
    arguments = target._schema.arguments
    places = tuple(a.name for a in arguments if not a.kwarg_only)
    return places, {a.name: a.default_value for a in arguments if a.has_default_value()}
