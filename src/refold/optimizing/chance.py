"""Models that draw random numbers in eval mode: a rewrite of them cannot be told from chance."""

from __future__ import annotations

import torch
from torch import nn

from refold.optimizing.calls import Inputs, split
from refold.verifying.leaves import same_leaves


def depends_on_chance(model: nn.Module, inputs: Inputs) -> bool:
    """Whether a call draws random numbers, and another one, with others, gives something else. (Kernels that add up in
    any order give something else too, without drawing.)"""
    args, kwargs = split(inputs)
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        before = _state(devices)
        first = model(*args, **kwargs)
        if all(map(torch.equal, before, _state(devices))):
            return False
        return not same_leaves(first, model(*args, **kwargs))


def _state(devices: list[torch.device]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]
