"""Hooks and switches of a model that were turned since something was built from it.

Adapters are merged, disabled and chosen by plain attributes of their layers, and features are read by hooks. Nobody is
told of either. Hooks are counted everywhere. Attributes are read in one module of each class: whoever turns a switch
turns it in all layers of a kind. What calls of the model write themselves is no switch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle

from refold.change import join_path

_SIMPLE = (bool, int, float, str, torch.dtype, torch.device, type(None))
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)
_MOST_ITEMS = 64
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_EVERYWHERE = ("_global_forward_pre_hooks", "_global_forward_hooks")
_OF_ALL = frozenset(nn.Module().__dict__)  # tables, hooks and modes, which are looked at elsewhere
_HARMLESS = "transformers."  # it puts hooks in when hidden states are asked for, and leaves them there


class Switches:
    """Asked at every call of an optimized model, so it is quick."""

    def __init__(self, model: nn.Module, written: Collection[str] = ()) -> None:
        """`written` are the attributes, by their paths, that calls write."""
        self._hooks = _Hooks(model)
        self._kinds = [_Kind(path, module, written) for path, module in _one_of_each_class(model)]

    def why_not(self) -> str | None:
        """Which hook or switch was turned; None if none was."""
        if self._hooks.are_others():
            return "a hook was added to the original or taken away since it was optimized"
        for kind in self._kinds:
            if kind.is_turned():
                return f"{kind.turned} was set since it was optimized"
        return None


class _Hooks:
    """The hooks of all modules. Torch numbers those that are added, so that there is little to look at."""

    def __init__(self, model: nn.Module) -> None:
        tables = [module.__dict__.get(name) for module in model.modules() for name in _HOOKS]
        tables += [getattr(torch_modules, name, None) for name in _EVERYWHERE]
        self._tables: list[dict[int, Any]] = [table for table in tables if table is not None]
        self._note()

    def are_others(self) -> bool:
        if self._next == RemovableHandle.next_id and list(map(len, self._used)) == self._counts:
            return False
        others = set(self._functions()) ^ self._known
        if not all(str(getattr(function, "__module__", "")).startswith(_HARMLESS) for function in others):
            return True
        self._note()
        return False

    def _note(self) -> None:
        self._next = RemovableHandle.next_id
        self._used = [table for table in self._tables if table]
        self._counts = list(map(len, self._used))
        self._known = set(self._functions())

    def _functions(self) -> Iterator[Callable[..., Any]]:
        for table in self._tables:
            yield from tuple(table.values())


class _Kind:
    """The switches of one module."""

    def __init__(self, path: str, module: nn.Module, written: Collection[str]) -> None:
        self._path, self._attributes = path, module.__dict__
        seen = {name: _copied(value) for name, value in module.__dict__.items() if _is_switch(name, value)}
        seen = {name: value for name, value in seen.items() if join_path(path, name) not in written}
        seen.setdefault("forward", module.__dict__.get("forward"))
        self._names, self._values = list(seen), list(seen.values())

    def is_turned(self) -> bool:
        return list(map(self._attributes.get, self._names)) != self._values

    @property
    def turned(self) -> str:
        """Where the switch is that was turned."""
        pairs = zip(self._names, self._values, strict=True)
        return join_path(self._path, next((n for n, v in pairs if self._attributes.get(n) != v), ""))


def _one_of_each_class(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """But not of torch's own: the attributes of its layers are sizes."""
    seen = set()
    for path, module in model.named_modules():
        if type(module) not in seen and not type(module).__module__.startswith("torch.nn."):
            seen.add(type(module))
            yield path, module


def _is_switch(name: str, value: Any) -> bool:
    if name in _OF_ALL:
        return False
    if isinstance(value, list | tuple | set | frozenset) and len(value) <= _MOST_ITEMS:
        return all(type(item) in _SIMPLE for item in value)
    if isinstance(value, dict) and len(value) <= _MOST_ITEMS:
        return all(type(key) in _SIMPLE and type(item) in _SIMPLE for key, item in value.items())
    return type(value) in (*_SIMPLE, *_FUNCTIONS)


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, list | set | dict) else value
