"""An optimized model that was put together by hand, with one way to run it at the sizes of its example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold.executors import InputSpec
from refold.optimization.optimized_module import OptimizedModule
from refold.optimization.prepared import Prepared, Way
from refold.optimization.spelling import Spelling
from refold.optimization.watch import Watch
from refold.report.data import ModelSummary
from refold.report.document import Report


def run_one_way(
    model: nn.Module,
    x: torch.Tensor,
    run: Callable[..., Any],
    watch: Watch,
    gm: GraphModule | None = None,
) -> OptimizedModule:
    """A model that runs so for tensors like x."""
    way = Way("engine", run, watch)
    spec, report = InputSpec.of((x,), {}), Report("by hand", ModelSummary("model"))
    return OptimizedModule(model, Prepared(Spelling(model.forward, (x,), {}), spec, gm, way, None, report))
