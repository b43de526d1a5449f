"""Whatever capture sets or touches on the way is put back: switches, random state, buffers, plain attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

SWITCHES: Mapping[str, Any] = {"use_cache": False}  # a graph to work on is clearer without the cache of its results


@contextmanager
def switched(model: nn.Module, switches: Mapping[str, Any] = SWITCHES) -> Iterator[tuple[str, ...]]:
    """Set switches in the configurations of a model and its parts; yields those that were really changed."""
    changed: list[tuple[Any, str, Any]] = []
    for config in _configs(model):
        for name, value in switches.items():
            if getattr(config, name, value) != value:
                changed.append((config, name, getattr(config, name)))
    try:
        for config, name, _old in changed:
            setattr(config, name, switches[name])
        yield tuple(sorted({f"{name}={switches[name]}" for _, name, _ in changed}))
    finally:
        for config, name, old in changed:
            setattr(config, name, old)


def _configs(model: nn.Module) -> list[Any]:
    """Every configuration object of a model, each once, with the configurations inside it."""
    found: dict[int, Any] = {}
    waiting = [config for m in model.modules() if (config := m.__dict__.get("config")) is not None]
    while waiting:
        config = waiting.pop()
        if id(config) in found or not hasattr(config, "__dict__"):
            continue
        found[id(config)] = config
        waiting += [v for k, v in vars(config).items() if k.endswith("config")]
    return list(found.values())


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Put back random state, buffers (batch-norm statistics) and attributes that a forward plants on its modules."""
    attributes = [(m, _plain(m), dict(m.named_buffers(recurse=False))) for m in model.modules()]
    values = {id(b): (b, b.detach().clone()) for _, _, buffers in attributes for b in buffers.values()}
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=_cuda_devices(model)))
            stack.enter_context(_without_fast_path())
            yield
    finally:
        for module, plain, buffers in attributes:
            _put_back(module, plain, buffers)
        with torch.no_grad():
            for buffer, value in values.values():
                if not same_bits(buffer, value):
                    buffer.copy_(value)


def _plain(module: nn.Module) -> dict[str, Any]:
    """A module's own attributes; containers are copied so that what a forward adds to them can be taken out."""
    copied = {k: v.copy() if type(v) in (dict, list, set) else v for k, v in vars(module).items()}
    return copied


def _put_back(module: nn.Module, plain: dict[str, Any], buffers: dict[str, torch.Tensor]) -> None:
    now = vars(module)
    for name in [name for name in now if name not in plain]:
        del now[name]
    for name, old in plain.items():
        if type(old) in (dict, list, set) and name in now and type(now[name]) is type(old):
            _refill(now[name], old)
        elif now.get(name) is not old:
            now[name] = old
    for name, buffer in buffers.items():
        if getattr(module, name, None) is not buffer:
            setattr(module, name, buffer)


def _refill(container: Any, old: Any) -> None:
    """Give a container its old content back, in place: other modules may hold the same one."""
    if len(container) == len(old) and _same_items(container, old):
        return
    container.clear()
    if isinstance(container, list):
        container.extend(old)
    else:
        container.update(old)


def _same_items(container: Any, old: Any) -> bool:
    if isinstance(container, dict):
        return all(k in container and container[k] is v for k, v in old.items()) and list(container) == list(old)
    if isinstance(container, list):
        return all(a is b for a, b in zip(container, old, strict=True))
    return container == old


def _cuda_devices(model: nn.Module) -> list[torch.device]:
    tensors = [*model.parameters(), *model.buffers()]
    return sorted({t.device for t in tensors if t.is_cuda}, key=str)


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """nn.TransformerEncoder's fused inference path rounds differently from its modules; a graph holds the modules."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in dtype, shape and every element; NaN equals NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if torch.equal(one, other):
        return True
    return bool(((one == other) | ((one != one) & (other != other))).all())
