"""Objects that are nothing but their attributes (a cache of keys and values): taken apart, and made again."""

from __future__ import annotations

import copyreg
import sys
from typing import Any

import torch


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, where a copy of it is a new object of its class with the same attributes; None for
    everything else: tensors, modules, functions, containers, and objects with a way of their own to be copied."""
    if isinstance(value, torch.Tensor | type) or callable(value) or not hasattr(value, "__dict__"):
        return None
    cls = type(value)
    if getattr(cls, "__setstate__", None) is not None or cls.__getstate__ is not object.__getstate__:
        return None
    try:
        made, given, _state, *items = value.__reduce_ex__(2)
    except Exception:
        return None
    is_plain = made is copyreg.__newobj__ and given == (cls,) and not any(items)  # type: ignore[attr-defined]
    return dict(vars(value)) if is_plain and is_named(cls) else None


def is_named(cls: type) -> bool:
    """Whether a class can be found again by its name."""
    try:
        return class_named(cls.__module__, cls.__qualname__) is cls
    except (KeyError, AttributeError):
        return False


def class_named(module: str, name: str) -> Any:
    """The class of this name."""
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return found


def new_object(module: str, name: str, attributes: dict[str, Any]) -> Any:
    """A new object of the class of this name, with these attributes. (In words that torch.compile can follow.)"""
    made = object.__new__(class_named(module, name))
    for key, value in attributes.items():
        object.__setattr__(made, key, value)
    return made


def return_type(name: str, values: tuple[Any, ...]) -> Any:
    """What torch gives several values in, such as ``torch.return_types.topk``."""
    return getattr(torch.return_types, name)(values)
