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
    """Why two calls of a model cannot be compared; None if they can.

    One that draws random numbers can, if another call, with others, gives the same. (Kernels that add up in any order
    give something else too, without drawing.)"""
    args, kwargs = fresh_call(*split(inputs))
    given = _structure(args, kwargs)
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        before = _state(devices)
        first = model(*args, **kwargs)
        draws = not all(map(torch.equal, before, _state(devices)))
        changes_arguments = _structure(args, kwargs) != given
        args, kwargs = fresh_call(*split(inputs))
        if draws and not same_leaves(first, model(*args, **kwargs)):
            return "it draws random numbers, so a rewrite cannot be told from chance"
    if changes_arguments:
        return "a call changes the dicts or lists among its arguments, which a graph cannot do"
    return None


def _structure(args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
    leaves, structure = flatten((args, kwargs))
    return structure, [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _state(devices: list[torch.device]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
