"""Whatever capture sets or touches on the way is put back: switches, random state, buffers, plain attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from refold.capturing.state import State

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
def untouched(model: nn.Module) -> Iterator[State]:
    """Put back random state and all that calls change in a model: see `State`, which is given to compare with."""
    state = State(model)
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
