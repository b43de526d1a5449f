"""Snapshots of all that a call can change in a model: compared with later, and put back.

That is the values of buffers and of the other tensors that modules hold, and every attribute: numbers, modes, lists,
dicts and plain objects, down to `_DEPTH`. Parameters are not copied, that would double a model: only those that torch
itself writes in a forward (embeddings with a ``max_norm``). Others that are bound to other memory get theirs back;
those that are written in place are only named.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from refold.fingerprint import same_bits
from refold.fx_private import join_path, version_of
from refold.record.containers import fill, same_items

_CONTAINERS = (dict, list, set, OrderedDict, defaultdict, deque)
_SIMPLE = {type(None), bool, int, float, str}
_FOREIGN = ("torch", "refold", "builtins", "functools")
_OWN = ("_parameters", "_buffers", "_modules")
_DEPTH = 3
_ABSENT = object()
_T = TypeVar("_T")

SWITCHES: Mapping[str, Any] = {"use_cache": False}  # a graph to work on is clearer without the cache of its results


class ModelState:
    """A snapshot of the modules of a model and of what they hold; without `parameters`, those are let alone."""

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
            if not same_items(container, old):
                fill(container, old)
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
        """Whether a value is what the other one was when the snapshot was taken."""
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


@contextmanager
def switched(model: nn.Module, switches: Mapping[str, Any] = SWITCHES) -> Iterator[tuple[str, ...]]:
    """Set switches in the configurations of a model and its parts; yields those that were really changed."""
    configs = configurations(vars(m).get("config") for m in model.modules())
    settings = [(config, name, getattr(config, name, value)) for config in configs for name, value in switches.items()]
    changed = [(config, name, old) for config, name, old in settings if old != switches[name]]
    try:
        for config, name, _old in changed:
            setattr(config, name, switches[name])
        yield tuple(sorted({f"{name}={switches[name]}" for _, name, _ in changed}))
    finally:
        for config, name, old in changed:
            setattr(config, name, old)


def configurations(roots: Iterable[Any]) -> Iterator[Any]:
    """Configuration objects and those inside them, each once."""
    known: set[int] = set()
    waiting = [root for root in roots if root is not None][::-1]
    while waiting:
        config = waiting.pop()
        if id(config) in known or not hasattr(config, "__dict__"):
            continue
        known.add(id(config))
        yield config
        waiting += [value for name, value in vars(config).items() if name.endswith("config")][::-1]


def all_or_nothing(model: nn.Module, work: Callable[[], _T]) -> _T:
    """Do some work on a model; whatever is raised (Ctrl-C included), the model is what it was, the memory that its
    parameters lie in included. The work is a function and not the body of a `with`, so that nothing comes between its
    end and the end of what guards it."""
    state = ModelState(model)
    try:
        return work()
    except BaseException:
        while True:  # putting back can be repeated: an interrupt in the middle of it only makes it start again
            try:
                state.put_back()
                break
            except KeyboardInterrupt:
                continue
        raise


@contextmanager
def untouched(model: nn.Module) -> Iterator[ModelState]:
    """Put back the random state and all that calls change in a model; yields the snapshot, to compare with."""
    state = ModelState(model)
    try:
        with untouched_random_state(model):
            yield state
    finally:
        state.put_back()


@contextmanager
def untouched_random_state(model: nn.Module) -> Iterator[None]:
    """Put back the random state of the processor and of every device the model is on."""
    tensors = (*model.parameters(), *model.buffers())
    with torch.random.fork_rng(devices=sorted({t.device for t in tensors if t.is_cuda}, key=str)):
        yield
