"""All that a call can change in a model, at one moment: to be compared with later, and to be put back.

That is the values of buffers and of the other tensors that modules hold, and every attribute: numbers, modes, lists,
dicts and plain objects, down to `_DEPTH`. Parameters are not copied, that would double a model: only those that torch
itself writes in a forward (embeddings with a ``max_norm``). Others that are bound to other memory get theirs back; of
those that are written in place it is known, and no more.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from refold.change import join_path
from refold.fingerprint import same_bits
from refold.fx_private import version_of

_CONTAINERS = (dict, list, set, OrderedDict, defaultdict, deque)
_SIMPLE = {type(None), bool, int, float, str}
_FOREIGN = ("torch", "refold", "builtins", "functools")
_OWN = ("_parameters", "_buffers", "_modules")
_DEPTH = 3


class State:
    """A photograph of the modules of a model and of what they hold; without `parameters`, those are let alone."""

    def __init__(self, model: nn.Module, *, parameters: bool = True) -> None:
        self._parameters = parameters
        self._modules = dict(model.named_modules())
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._values: dict[int, _Value] = {}
        for module in self._modules.values():
            self._hold(module, 0)
            if isinstance(module, torch.jit.ScriptModule):  # it keeps its tensors out of sight of Python
                for buffer in module.buffers(recurse=False):
                    self._hold_tensor(buffer)

    def _hold(self, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            self._hold_tensor(value)
            return
        content = _content(value)
        if content is None or id(content) in self._contents or depth > _DEPTH:
            return
        self._contents[id(content)] = content, content.copy()
        if isinstance(value, nn.Embedding | nn.EmbeddingBag) and value.max_norm is not None:
            self._values[id(value.weight)] = _Value(value.weight, copied=True)
        for inner in tuple(content.values() if isinstance(content, dict) else content):
            if type(inner) not in _SIMPLE:
                self._hold(inner, 0 if isinstance(inner, nn.Module) else depth + 1)

    def _hold_tensor(self, tensor: torch.Tensor) -> None:
        wanted = self._parameters or not isinstance(tensor, nn.Parameter)
        if wanted and id(tensor) not in self._values and _has_values(tensor):
            self._values[id(tensor)] = _Value(tensor, copied=not isinstance(tensor, nn.Parameter))

    def put_back(self) -> None:
        """Make everything what it was, of the same objects. What was not changed is not touched."""
        for container, old in self._contents.values():
            if not _same_items(container, old):
                _refill(container, old)
        for value in self._values.values():
            value.put_back()

    def overwritten(self, model: nn.Module) -> list[str]:
        """Parameters that were written in place, and so cannot be put back."""
        lost = {id(value.tensor) for value in self._values.values() if value.is_lost()}
        return [name for name, parameter in model.named_parameters() if id(parameter) in lost]

    def changes(self) -> dict[str, Any]:
        """What is no longer the value that it was: attributes, buffers and parameters by their paths, as they are."""
        found: dict[str, Any] = {}
        for path, module in self._modules.items():
            before = self._contents[id(vars(module))][1]
            for name, (now, old) in _side_by_side(vars(module), before):
                if name in _OWN and id(old) in self._contents:
                    held = _side_by_side(now, self._contents[id(old)][1])
                    found |= {join_path(path, k): _owned(new) for k, (new, was) in held if not self._is(new, was)}
                elif not self._is(now, old):
                    found[join_path(path, name)] = _owned(now)
        return found

    def _is(self, now: Any, before: Any) -> bool:
        """Whether a value is what the other one was when the photograph was taken."""
        if type(now) in _SIMPLE:
            return type(now) is type(before) and (now is before or bool(now == before))
        if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
            return self._is_tensor(now, before)
        if type(now) is not type(before) or isinstance(now, nn.Module):
            return now is before
        one, other = _content(now), _content(before)
        if one is None or id(other) not in self._contents:
            return now is before or _equal(now, before)
        old = self._contents[id(other)][1]
        if len(one) != len(old) or isinstance(one, set):
            return bool(one == old)
        if isinstance(one, dict):
            return all(key in one and self._is(one[key], value) for key, value in old.items())
        return all(map(self._is, one, old))

    def _is_tensor(self, now: torch.Tensor, before: torch.Tensor) -> bool:
        held = self._values.get(id(before))
        if held is None or not _has_values(now):
            return now is before
        return not (now is before and held.is_lost()) and same_bits(now, held.value)


class _Value:
    """A tensor, its memory, and what was in it: a copy, or where it is not copied, the memory itself."""

    def __init__(self, tensor: torch.Tensor, copied: bool) -> None:
        self.tensor = tensor
        self.memory = tensor.detach()
        self.value = self.memory.clone() if copied else self.memory
        self.version = version_of(tensor)
        self.has_history = tensor.grad_fn is not None

    def is_lost(self) -> bool:
        return self.value is self.memory and version_of(self.tensor) != self.version

    def put_back(self) -> None:
        tensor = self.tensor
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            if tensor.grad_fn is not None and not self.has_history:
                tensor.detach_()
            if (tensor.data_ptr(), tensor.shape) != (self.memory.data_ptr(), self.memory.shape):
                tensor.data = self.memory
            if self.value is not self.memory and not same_bits(tensor, self.value):
                tensor.copy_(self.value)


_ABSENT = object()


def _content(value: Any) -> Any:
    """The list, set or dict whose entries a value is made of: itself, or the attributes of an object."""
    if type(value) in _CONTAINERS:
        return value
    if isinstance(value, nn.Module):
        return vars(value)
    is_object = hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value)
    return vars(value) if is_object and not type(value).__module__.startswith(_FOREIGN) else None


def _has_values(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested


def _side_by_side(now: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name in dict.fromkeys((*before, *now)):
        yield name, (now.get(name, _ABSENT), before.get(name, _ABSENT))


def _owned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # an array, or whatever else has no yes or no
        return False


def _same_items(container: Any, old: Any) -> bool:
    if len(container) != len(old):
        return False
    if isinstance(container, dict):
        return list(container) == list(old) and all(map(operator.is_, container.values(), old.values()))
    return container == old if isinstance(container, set) else all(map(operator.is_, container, old))


def _refill(container: Any, old: Any) -> None:
    """Give a container its old content back, in place: others may hold the same one."""
    container.clear()
    if isinstance(container, dict | set):
        container.update(old)
    else:
        container.extend(old)
