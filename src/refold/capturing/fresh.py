"""A call's arguments once more, in containers and tensors of their own: a forward may write into what it is given."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from refold.capturing.trees import PLAIN, SYMBOLS
from refold.plain_objects import attributes_of, new_object


def fresh_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with copies of their tensors, containers and plain objects. What was one object stays one;
    objects that cannot be taken apart are given as they are."""
    known: dict[int, Any] = {}
    return tuple(_fresh(value, known) for value in args), {key: _fresh(value, known) for key, value in kwargs.items()}


def _fresh(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, (*PLAIN, *SYMBOLS)) and not hasattr(value, "_fields"):
        return value
    if id(value) not in known:
        known[id(value)] = _copied(value, known)
    return known[id(value)]


def _copied(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, tuple):
        return _tuple_of(type(value), [_fresh(item, known) for item in value])
    if isinstance(value, list):
        made = copy.copy(value)
        made[:] = [_fresh(item, known) for item in value]
        return made
    if isinstance(value, dict | UserDict):
        return _dict_like(value, known)
    attributes = attributes_of(value)
    if attributes is None:
        return value
    return new_object(
        type(value).__module__, type(value).__qualname__, {k: _fresh(v, known) for k, v in attributes.items()}
    )


def _tuple_of(cls: type, items: list[Any]) -> Any:
    return cls(*items) if hasattr(cls, "_fields") else cls(items)


def _dict_like(value: Any, known: dict[int, Any]) -> Any:
    """A copy of a dict, or of an object that keeps one (transformers' outputs and encodings)."""
    made = copy.copy(value)
    for name, attribute in vars(made).items() if hasattr(made, "__dict__") else ():
        vars(made)[name] = _fresh(attribute, known)
    if isinstance(made, dict):
        for key, item in value.items():
            dict.__setitem__(made, key, _fresh(item, known))
    return made
