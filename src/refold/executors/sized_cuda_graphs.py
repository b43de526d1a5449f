"""A CUDA graph for each size that comes again, over code that is compiled once for any size.

A size that is new runs the compiled code directly; its third call records a graph. So no call waits for a compilation,
and calls of the sizes that are usual are one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from refold.executors.cuda_graph import CudaGraph
from refold.executors.interface import Executor
from refold.executors.torch_compile import CompileOnce

GRAPHS = 64
"""That are kept for different sizes."""
SIGHTINGS = 3
"""Of sizes, until a graph is recorded for them."""


class SizedCudaGraphs(Executor):
    """`compiled` prepares the code for any size; `record` makes an executor that replays what it is given."""

    takes_any_size = True
    keeps_meaning = True
    hears_interrupts = True

    def __init__(
        self,
        name: str = "compile-open+cuda_graph",
        *,
        compiled: Executor | None = None,
        record: Callable[[Executor], Executor] | None = None,
    ) -> None:
        self.name = name
        self.compiled = compiled or CompileOnce("compile-open")
        self.record = record or recorded

    def available(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"a CUDA graph needs a CUDA device, not {device.type}"
        return self.compiled.available(device)

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        code = self.compiled.prepare(module, args, kwargs)
        return self.record(Ready("compiled once", code)).prepare(module, args, kwargs)


class Ready(Executor):
    """Code that was prepared already, for any size."""

    takes_any_size = True
    keeps_meaning = True
    hears_interrupts = True

    def __init__(self, name: str, code: Callable[..., Any]) -> None:
        self.name, self.code = name, code

    def available(self, device: torch.device) -> str | None:
        return None

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        return self.code


def recorded(inner: Executor) -> Executor:
    """What records a graph for each size that comes again, of what the inner executor prepares for any size."""
    return CudaGraph("recorded", inner=inner, max_shapes=GRAPHS, new_shapes="capture", sightings=SIGHTINGS)
