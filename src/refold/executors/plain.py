"""The module as it is. Only a graph minds what it is given: it may have been captured for just such inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold.executors.input_spec import example
from refold.executors.interface import CallRunner, Executor


class Plain(Executor):
    name = "plain"
    takes_any_size = True
    keeps_meaning = True
    hears_interrupts = True
    takes_packed = True

    def available(self, device: torch.device) -> str | None:
        return None

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        if not isinstance(module, GraphModule):
            return module
        spec, tree, tensors = example(args, kwargs, open_sizes=True)
        return CallRunner(spec, module, module, tree, tensors, unchecked=functools.partial(nn.Module.__call__, module))
