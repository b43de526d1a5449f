"""How far a command has come: a bar with the time that is left on a terminal, else one line for each thing begun."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from refold.command_line.screen import Screen, printable
from refold.optimizing.progress import Progress as Tell


@contextmanager
def told(screen: Screen, quiet: bool = False) -> Iterator[Tell]:
    """A callback that takes what is being done and how much is done, from 0 to 1."""
    if quiet:
        yield lambda what, done: None
    elif screen.err.is_terminal:
        with _bar(screen) as tell:
            yield tell
    else:
        yield _lines(screen)


@contextmanager
def _bar(screen: Screen) -> Iterator[Tell]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen.err, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)

        def tell(what: str, done: float) -> None:
            bar.update(task, description=printable(what), completed=done)

        yield tell


def _lines(screen: Screen) -> Tell:
    start, last = time.monotonic(), [""]

    def tell(what: str, done: float) -> None:
        if what != last[0]:
            last[0] = what
            screen.tell(f"[{time.monotonic() - start:5.0f} s, {done:4.0%}] {what}")

    return tell
