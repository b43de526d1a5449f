"""What is to be optimized, for which call, and how: one value that every stage of the work reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from refold.call_arguments import CallArguments
from refold.measurement.timing import Comparison
from refold.optimization.budget import Budget
from refold.optimization.cache_folder import CacheFolder
from refold.optimization.decision import Decision
from refold.optimization.progress import Progress
from refold.optimization.selected_outputs import SelectedOutputs
from refold.optimization.sizes import OtherSizes
from refold.optimization.zeroed_outputs import ZeroedOutputs
from refold.rewrite.transformation import Transformation


@dataclass(frozen=True)
class Job:
    """One model, one call of it, and the settings of `optimize`."""

    model: nn.Module
    inputs: CallArguments
    pipeline: tuple[Transformation, ...]
    level: str
    backend: str
    effort: str
    budget: Budget
    progress: Progress
    open_sizes: bool = True
    """Whether calls of other sizes than the example's are to run fast, too."""
    outputs: SelectedOutputs | None = None
    """The outputs that are wanted; None where all are."""
    padding: str | None = None
    """"zeros" where nobody reads outputs at padding."""
    zeroed: ZeroedOutputs | None = None
    """The outputs that are zeros at padding on every way."""
    known: tuple[str, ...] = ()
    """The executors that were chosen before, for the example's sizes and for others: these are prepared, and no race is
    run where the first of them is ready."""
    max_memory: int | None = None
    """The bytes that a way to run the model may hold beside it and need during a call; None for no bound."""
    others: OtherSizes | None = None
    """Calls of other sizes, that the user gave or that were drawn; None where the graph takes the example's alone."""
    cache: CacheFolder | None = None
    """Where decisions are kept between processes; None where they are not."""
    given: Decision | None = None
    """A decision that came with a saved model."""
    only: tuple[str, ...] | None = None
    """The executors that are raced; None for all that there are."""
    earlier: Comparison | None = None
    """Rounds of an earlier race, which count."""

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and the keyword arguments of the call."""
        return self.inputs.args, self.inputs.kwargs

    @cached_property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self.inputs.device(self.model)

    @cached_property
    def rounding(self) -> float:
        """The coarsest rounding that the model computes with: outputs in float32 may come from layers in half
        precision, or from autocast."""
        weights = (*self.model.parameters(), *self.model.buffers())
        dtypes = {tensor.dtype for tensor in weights if tensor.is_floating_point()}
        if torch.is_autocast_enabled(self.device.type):
            dtypes.add(torch.get_autocast_dtype(self.device.type))
        return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)

    @property
    def original(self) -> Callable[..., Any]:
        """The model as callers know it: with zeros at padding where nobody reads it."""
        return self.model if self.zeroed is None else self.zeroed.called(self.model)

    def call(self, run: Callable[..., Any]) -> Any:
        """Call the model, or something that stands for it, with the inputs of the job and without gradients."""
        with torch.no_grad():
            return self.inputs.given_to(run)

    def part(self, start: float, stop: float) -> Job:
        """The same job, which reports its progress as a part of the whole."""
        report = self.progress
        return replace(self, progress=lambda what, done: report(what, start + done * (stop - start)))
