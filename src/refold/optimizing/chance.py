"""Models that draw random numbers in eval mode: a rewrite of them cannot be told from chance."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from refold.fingerprint import same_bits
from refold.optimizing.calls import Inputs, split
from refold.verifying.leaves import leaves_of


def depends_on_chance(model: nn.Module, inputs: Inputs) -> bool:
    """Whether a call draws random numbers, and another one, with others, gives something else. (Kernels that add up in
    any order give something else too, without drawing.)"""
    args, kwargs = split(inputs)
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        before = _state(devices)
        first = list(leaves_of(model(*args, **kwargs)))
        if all(map(torch.equal, before, _state(devices))):
            return False
        second = list(leaves_of(model(*args, **kwargs)))
    return len(first) != len(second) or not all(_same(a, b) for (_, a), (_, b) in zip(first, second, strict=True))


def _state(devices: list[torch.device]) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _same(a: Any, b: Any) -> bool:
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return same_bits(a, b) if both else bool(a == b)
