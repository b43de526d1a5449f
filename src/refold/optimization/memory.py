"""What ways to run a model hold and need in memory, and which of them are above the bound that was given."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from refold.errors import RefoldError
from refold.measurement.clock import peak_memory, used_memory
from refold.optimization.job import Job
from refold.wording import byte_count

_UNITS = {"": 1, "B": 1} | {f"{letter}B": 1000**i for i, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**i for i, letter in enumerate("KMGT", 1)}


@dataclass(frozen=True)
class Memory:
    """What one way to run a model holds beside the model since it was prepared, and what a call of the example's sizes
    needs at most above that; None where the system does not tell."""

    held: int | None = None
    peak: int | None = None

    def why_above(self, most: int | None) -> str | None:
        """Why this way is not for a bound on both together; None where it is."""
        total = (self.held or 0) + (self.peak or 0)
        if most is None or total <= most:
            return None
        parts = f"it holds {byte_count(self.held or 0)} and needs {byte_count(self.peak or 0)} during a call"
        return f"{parts}, more than max_memory allows ({byte_count(most)})"


def as_bytes(given: int | str | None) -> int | None:
    """A number of bytes, given as one or with a unit: "2GB", "512 MiB"."""
    if given is None or (isinstance(given, int) and not isinstance(given, bool) and given >= 0):
        return given
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", given) if isinstance(given, str) else None
    if found is None or found[2].upper() not in _UNITS:
        raise RefoldError(f"max_memory must be a number of bytes, or one with a unit such as '2GB', not {given!r}.")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def prepared_with_memory(job: Job, prepare: Callable[[], Callable[..., Any]]) -> tuple[Callable[..., Any], Memory]:
    """What an executor prepares, and the memory of that: after its first call, which may still set something up."""
    before = used_memory(job.device)
    run = prepare()
    job.call(run)
    after = used_memory(job.device)
    held = None if before is None or after is None else max(after - before, 0)
    return run, Memory(held, peak_memory(lambda: job.call(run), job.device))
