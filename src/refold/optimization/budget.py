"""How much of the time that optimizing may take is left."""

from __future__ import annotations

import math
import time

import torch
from torch import nn

EFFORTS = ("quick", "default", "max")
_SECONDS = {"cpu": 30.0}
_SECONDS_ON_ACCELERATORS = 60.0
_LARGE = 500_000_000  # parameters


class Budget:
    """A clock that starts when it is made; without a limit it never runs out."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = None if seconds is not None and math.isinf(seconds) else seconds
        self.capturing = 0.0
        """What capturing the model took: engines trace it once more at the least."""
        self.is_usual = False
        """Nobody asked for it: then it bounds what is prepared and raced, and no rewrite is left out for it."""
        self._start = time.monotonic()

    @classmethod
    def usual(cls, model: nn.Module, device: torch.device, effort: str) -> Budget:
        """What is spent where the user says nothing."""
        if effort == "max":
            return cls(None)
        seconds = _SECONDS.get(device.type, _SECONDS_ON_ACCELERATORS)
        budget = cls(2 * seconds if sum(p.numel() for p in model.parameters()) > _LARGE else seconds)
        budget.is_usual = True
        return budget

    def captured(self) -> None:
        """All that was spent so far went into capturing the model."""
        self.capturing = self.spent

    def restart(self) -> None:
        """Nothing is spent yet: what passed was waiting for another process."""
        self._start = time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return float("inf") if self.seconds is None else max(0.0, self.seconds - self.spent)

    @property
    def used(self) -> float:
        """The part of the budget that is spent since the model was captured; 0 without a limit."""
        return 0.0 if self.seconds is None else (self.spent - self.capturing) / self.seconds

    def share(self, part: float, most: float) -> float:
        """A part of what is left, but no more than `most` seconds."""
        return min(most, self.left * part)
