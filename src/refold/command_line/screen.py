"""Where a command writes: its result to stdout, as tables or as JSON, and everything else to stderr."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.text import Text

_WIDTH = 120


class Screen:
    """The two streams of a command. With `json`, stdout gets one JSON object and not a byte else."""

    def __init__(self, *, as_json: bool = False, out: TextIO | None = None) -> None:
        self.as_json = as_json
        self._out = out or sys.stdout
        self.out = _Console(file=self._out, highlight=False, markup=False, emoji=False)
        if not self.out.is_terminal:
            self.out.width = _WIDTH  # a file or a pipe has room for whole tables
        self.err = _Console(stderr=True, highlight=False, markup=False, emoji=False)

    def tell(self, message: str) -> None:
        """Say something to the person at the terminal."""
        self.err.print(Text(printable(message)), soft_wrap=True)

    def show(self, data: dict[str, Any], *parts: RenderableType | str) -> None:
        """The result: as JSON, or as what people read."""
        if self.as_json:
            self._out.write(json.dumps(_finite(data), indent=2, allow_nan=False, default=str) + "\n")
            self._out.flush()
            return
        for part in parts:
            shown = Text(printable(part)) if isinstance(part, str) else part
            self.out.print(shown, soft_wrap=isinstance(shown, Text))


class _Console(Console):
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


@contextlib.contextmanager
def quiet_stdout(wanted: bool) -> Iterator[TextIO]:
    """A stream that goes to the real stdout, while everything that others print there goes to stderr."""
    if not wanted:
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
        with contextlib.suppress(BrokenPipeError):
            real.flush()
        sys.stdout = python_stdout
        os.dup2(kept, 1)
        with contextlib.suppress(BrokenPipeError):
            real.close()
