"""How far optimizing has come: reported to a callback, or shown as a bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Progress = Callable[[str, float], None]
"""Called with what is being done and how much is done, from 0 to 1."""


def silent(what: str, done: float) -> None:
    """Report to nobody."""


@contextmanager
def shown(progress: bool | Progress | None) -> Iterator[Progress]:
    """The callback to report to. None: a bar in a notebook or on a terminal, if tqdm or rich is installed; True: a bar,
    always."""
    if callable(progress):
        yield progress
    elif progress is not False and _is_notebook():
        with _notebook_bar() as show:
            yield show
    elif progress is False or (progress is None and not sys.stderr.isatty()):
        yield silent
    else:
        try:
            from rich.console import Console
        except ImportError:
            yield silent
            return
        with progress_bar(Console(stderr=True)) as show:
            yield show


@contextmanager
def progress_bar(console: Any) -> Iterator[Progress]:
    """A bar on a console of rich, which is gone when the work is done."""
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    words = TextColumn("{task.description}", markup=False)  # names of layers and files are no markup
    columns = (SpinnerColumn(), words, BarColumn(), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda what, done: bar.update(task, description=what, completed=done)


def _is_notebook() -> bool:
    """Whether the code of a notebook's cell calls: a terminal with IPython is none."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and type(ipython.get_ipython()).__name__ == "ZMQInteractiveShell"


@contextmanager
def _notebook_bar() -> Iterator[Progress]:
    """A bar below the cell, which is gone when the work is done."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        yield silent
        return
    with tqdm(total=100, leave=False, bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}") as bar:

        def show(what: str, done: float) -> None:
            bar.n = 100 * done
            bar.set_description_str(what)

        yield show
