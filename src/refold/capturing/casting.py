"""Casts inside a forward that change nothing are skipped while a model is exported.

Some routers run ``self.classifier = self.classifier.to(torch.float32)`` in every forward. With fake parameters torch
refuses to swap them, although the module has that dtype already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


@contextmanager
def idle_casts(model: nn.Module) -> Iterator[None]:
    """Give every module a ``to`` of its own that does nothing where nothing is to be done; taken away afterwards."""
    modules = [m for m in model.modules() if "to" not in vars(m)]
    for module in modules:
        vars(module)["to"] = partial(_to_where_needed, module)
    try:
        yield
    finally:
        for module in modules:
            vars(module).pop("to", None)


def _to_where_needed(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    wanted = [*args, *kwargs.values()]
    tensors = [*module.parameters(), *module.buffers()]
    if all(_is_so(value, tensors) for value in wanted if value is not None):
        return module
    return type(module).to(module, *args, **kwargs)


def _is_so(value: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether all tensors have this dtype or device already; False for anything else."""
    if isinstance(value, torch.dtype):
        return all(t.dtype == value for t in tensors if t.is_floating_point())
    if isinstance(value, (torch.device, str)):
        return all(t.device == torch.device(value) for t in tensors)
    return False
