"""Telling how far optimizing has come: a callback, or a bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Progress = Callable[[str, float], None]
"""Called with what is being done and how much is done, from 0 to 1."""


def silent(what: str, done: float) -> None:
    """Nobody wants to know."""


@contextmanager
def shown(progress: bool | Progress | None) -> Iterator[Progress]:
    """The callback to report to. None: a bar if there is a terminal and rich is installed; True: a bar, always."""
    if callable(progress):
        yield progress
        return
    if progress is False or (progress is None and not sys.stderr.isatty()):
        yield silent
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar
    except ImportError:
        yield silent
        return
    columns: list[Any] = [TextColumn("[bold]{task.description}"), BarColumn(), TimeElapsedColumn()]
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1.0)

        def show(what: str, done: float) -> None:
            bar.update(task, description=what, completed=done)

        yield show
