"""The module as it is. Only a graph minds what it is given: it may have been captured for just such inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from .base import CallRunner, Executor
from .signature import example


class Plain(Executor):
    name = "plain"

    def available(self, device: torch.device) -> str | None:
        return None

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        if not isinstance(module, GraphModule):
            return module
        signature, layout, tensors = example(args, kwargs)
        return CallRunner(signature, module, module, layout, tensors)
