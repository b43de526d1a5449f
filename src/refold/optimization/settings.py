"""How a model is to be optimized, as the caller says it: checked, and brought to what the stages read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from refold.errors import RefoldError
from refold.optimization.budget import EFFORTS, Budget
from refold.optimization.default_pipeline import chosen_pipeline, usual_for
from refold.optimization.memory import as_bytes
from refold.optimization.selected_outputs import SelectedOutputs
from refold.rewrite.transformation import Transformation


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of `refold.optimize`; what they mean stands there."""

    level: str = "default"
    pipeline: Sequence[Transformation] | Transformation | None = None
    backend: str = "auto"
    effort: str = "default"
    time_budget: float | None = None
    sizes: str = "open"
    outputs: Sequence[str | int] | None = None
    padding: str | None = None
    on_fallback: str = "warn"
    max_memory: int | str | None = None

    def __post_init__(self) -> None:
        if self.sizes not in ("open", "example"):
            raise RefoldError(f"sizes must be 'open' or 'example', not {self.sizes!r}.")
        if self.effort not in EFFORTS:
            raise RefoldError(f"effort must be one of {', '.join(EFFORTS)}, not {self.effort!r}.")
        if self.time_budget is not None and not self.time_budget > 0:
            raise RefoldError(f"time_budget must be a positive number of seconds, or None, not {self.time_budget!r}.")
        if self.padding not in (None, "zeros"):
            raise RefoldError(
                f"padding must be None, or 'zeros' for outputs that are not read there, not {self.padding!r}."
            )
        as_bytes(self.max_memory)

    def transformations(self, device: torch.device) -> tuple[Transformation, ...]:
        """Those that are asked for, or those that are usual on this device."""
        found = chosen_pipeline(self.level, self.pipeline)
        return found if self.pipeline is not None else usual_for(found, device, self.effort)

    def budget(self, model: nn.Module, device: torch.device) -> Budget:
        """The time that may be spent, counted from now."""
        return Budget(self.time_budget) if self.time_budget is not None else Budget.usual(model, device, self.effort)

    @property
    def selected(self) -> SelectedOutputs | None:
        """The outputs that are wanted; None where all are."""
        return None if self.outputs is None else SelectedOutputs(tuple(self.outputs))
