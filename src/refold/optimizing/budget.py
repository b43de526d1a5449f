"""How much of the time that optimizing may take is left."""

from __future__ import annotations

import time


class Budget:
    """A clock that starts when it is made; without a limit it never runs out."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._start = time.monotonic()
        self._tracing = 0.0

    def traced(self) -> None:
        """All that was spent so far went into tracing the model."""
        self._tracing = self.spent

    @property
    def is_enough_to_prepare(self) -> bool:
        """Whether there is time to prepare an executor, which traces the model once more at the least."""
        return self.left > self._tracing

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
        """The part of the budget that is spent, from 0; never above 0 without a limit."""
        return 0.0 if self.seconds is None else self.spent / self.seconds

    def share(self, part: float, most: float) -> float:
        """A part of what is left, but no more than `most` seconds."""
        return min(most, self.left * part)
