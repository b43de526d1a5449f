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


def argument(call: Any, index: int, name: str, default: Any = None) -> Any:
    """One argument of a call (a node, or what has `args` and `kwargs` as well), by its index or by its name."""
    return call.args[index] if len(call.args) > index else call.kwargs.get(name, default)


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


def bind(node: Node, names: tuple[str, ...]) -> dict[str, Any] | None:
    """A call's arguments by name; None if it has arguments of other names."""
    if len(node.args) > len(names) or not set(node.kwargs) <= set(names):
        return None
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def axis_order(name: str, call: Any, rank: int | None) -> list[int] | None:
    """The order in which a call of this name puts the axes of a value; None where it is another call, or not known."""
    if name == "permute":
        given = call.args[1:] or (call.kwargs.get("dims"),)
        dims = given[0] if isinstance(given[0], list | tuple) else given
    elif name in ("transpose", "swapaxes", "swapdims"):
        dims = (argument(call, 1, "dim0"), argument(call, 2, "dim1"))
    else:
        dims = (0, 1) if name == "t" else (None,)
    if rank is None or not all(isinstance(dim, int) and -rank <= dim < rank for dim in dims):
        return None
    places = [dim % rank for dim in dims]
    if name == "permute":
        return places if len(places) == rank else None
    order = list(range(rank))
    order[places[0]], order[places[1]] = places[1], places[0]
    return order


def per_axis(value: Any, dims: int) -> tuple[Any, ...]:
    """A setting for each of some axes; one number may stand for all of them."""
    if not isinstance(value, tuple | list):
        return (value,) * dims
    return tuple(value) * dims if len(value) == 1 else tuple(value)
