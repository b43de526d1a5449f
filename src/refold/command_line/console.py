"""Where a command writes: its result to stdout, as tables or as JSON, and everything else to stderr."""

from __future__ import annotations

import io
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from rich import box
from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from refold.optimization.progress import Progress, progress_bar, silent

_WIDTH = 120
_BETWEEN_LINES = 5.0
"""Seconds between two lines of progress in a log."""


class Console:
    """The two streams of a command. With `json`, stdout gets one JSON object and not a byte else; if it is quiet,
    stderr gets errors alone."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False, out: TextIO | None = None) -> None:
        self.as_json, self.quiet = as_json, quiet
        self._out = out or sys.stdout
        self.out = _Stream(file=self._out, highlight=False, markup=False, emoji=False)
        if not self.out.is_terminal:
            self.out.width = _WIDTH  # a file or a pipe has room for whole tables
        self.err = _Stream(stderr=True, highlight=False, markup=False, emoji=False)

    def log(self, message: str) -> None:
        """Write a message to stderr."""
        self.err.print(Text(printable(message)), soft_wrap=True)

    def tell(self, message: str) -> None:
        """Write to stderr how the work goes on, to whoever wants to know."""
        if not self.quiet:
            self.log(message)

    @property
    def is_watched(self) -> bool:
        """Whether somebody sees a bar move: colours that are forced make a log no terminal, nor is a dumb one one."""
        return self.err.file.isatty() and self.err.is_interactive and not self.err.is_dumb_terminal

    def show(self, data: dict[str, Any], *parts: RenderableType | str) -> None:
        """The result: as JSON, or as what people read."""
        if self.as_json:
            self._out.write(json.dumps(_finite(data), indent=2, allow_nan=False, default=str) + "\n")
            self._out.flush()
            return
        for part in parts:
            shown = Text(printable(part)) if isinstance(part, str) else part
            self.out.print(shown, soft_wrap=isinstance(shown, Text))


class _Stream(RichConsole):
    """A console that leaves it to the command what a reader that went away means; rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def ready_streams() -> None:
    """Let both streams write signs that their encoding does not have, as escapes: a message about a file called é must
    not be an error of its own where the terminal knows only ASCII. A stdout that is closed takes everything."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they are written as words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def printable(text: str) -> str:
    """A text in which nothing but letters, signs and line ends is left: names in models and folders are data, and must
    not move a terminal's cursor or change its title."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


@contextmanager
def quiet_stdout(as_json: bool) -> Iterator[TextIO]:
    """A stream that goes to the real stdout, while everything that others print there goes to stderr."""
    if not as_json:
        yield sys.stdout
        return
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # stdout is closed
        yield sys.stdout
        return
    os.dup2(2, 1)
    real = os.fdopen(kept, "w", encoding="utf-8")
    python_stdout, sys.stdout = sys.stdout, sys.stderr
    try:
        yield real
    finally:
        with suppress(BrokenPipeError):
            real.flush()
        sys.stdout = python_stdout
        os.dup2(kept, 1)
        with suppress(BrokenPipeError):
            real.close()


def number(heading: str) -> Column:
    """A column of numbers."""
    return Column(heading, justify="right", no_wrap=True)


def table(title: str, columns: Sequence[str | Column], rows: Iterable[Sequence[object]]) -> Table:
    """A table of plain texts."""
    made = Table(*columns, title=Text(printable(title)), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for column in made.columns:
        column.overflow = "fold"
    for row in rows:
        made.add_row(*(Text(printable(str(cell))) for cell in row))
    return made


def grouped(pairs: Iterable[tuple[str, str]], most_names: int = 3) -> list[tuple[int, str, str]]:
    """(how many, reason, a few names) for each reason, the most frequent first."""
    found: dict[str, list[str]] = {}
    for name, reason in pairs:
        found.setdefault(reason, []).append(name)
    ranked = sorted(found.items(), key=lambda item: -len(item[1]))
    return [
        (len(names), reason, ", ".join(names[:most_names]) + (", …" if len(names) > most_names else ""))
        for reason, names in ranked
    ]


@contextmanager
def progress(console: Console) -> Iterator[Progress]:
    """A callback that takes what is being done and how much is done: a bar on a terminal, else a line now and then."""
    if console.quiet:
        yield silent
    elif not console.is_watched:
        yield _line_logger(console)
    else:
        with progress_bar(console.err) as show:
            yield lambda what, done: show(printable(what), done)


def _line_logger(console: Console) -> Progress:
    start, next_line = time.monotonic(), 0.0

    def log(what: str, done: float) -> None:
        nonlocal next_line
        now = time.monotonic() - start
        if now >= next_line:
            next_line = now + _BETWEEN_LINES
            console.log(f"[{now:5.0f} s, {done:4.0%}] {what}")

    return log
