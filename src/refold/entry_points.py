"""What other packages offer through entry points. What cannot be used is left out, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import TypeVar

from refold.wording import first_line

_T = TypeVar("_T")


class Unusable(Exception):
    """Why an entry point is not what its group is for."""


@dataclass(frozen=True)
class Problem:
    """A plugin that was left out, and why."""

    name: str
    origin: str
    reason: str

    def __str__(self) -> str:
        return f"The plugin {self.name} ({self.origin}) was left out: {self.reason}."


def origin_of(entry: EntryPoint) -> str:
    """The package that an entry point comes from."""
    return entry.dist.name if entry.dist is not None else entry.value


def load_offered(entry: EntryPoint, load: Callable[[EntryPoint], _T]) -> _T | Problem:
    """What an entry point offers, or why it cannot be used."""
    try:
        return load(entry)
    except (Exception, SystemExit) as error:  # another package's code may raise anything while it is imported
        return Problem(entry.name, origin_of(entry), str(error) if isinstance(error, Unusable) else first_line(error))
