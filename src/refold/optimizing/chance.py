"""Models whose calls cannot be compared: they draw random numbers in eval mode, or write into what they are given."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from refold.capturing.fresh import fresh_call
from refold.executors.tree import flatten
from refold.optimizing.calls import Inputs, split
from refold.verifying.leaves import same_leaves


def why_not_comparable(model: nn.Module, inputs: Inputs) -> str | None:
    """Why two calls of a model cannot be compared; None if they can."""
    if depends_on_chance(model, inputs):
        return "it draws random numbers, so a rewrite cannot be told from chance"
    args, kwargs = fresh_call(*split(inputs))
    before = _structure(args, kwargs)
    with torch.no_grad():
        model(*args, **kwargs)
    if _structure(args, kwargs) != before:
        return "a call changes the dicts or lists among its arguments, which a graph cannot do"
    return None


def _structure(args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
    leaves, structure = flatten((args, kwargs))
    return structure, [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def depends_on_chance(model: nn.Module, inputs: Inputs) -> bool:
    """Whether a call draws random numbers, and another one, with others, gives something else. (Kernels that add up in
    any order give something else too, without drawing.)"""
    args, kwargs = fresh_call(*split(inputs))
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        before = _state(devices)
        first = model(*args, **kwargs)
        if all(map(torch.equal, before, _state(devices))):
            return False
        args, kwargs = fresh_call(*split(inputs))
        return not same_leaves(first, model(*args, **kwargs))


def _state(devices: list[torch.device]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
