"""The way into the `refold` command. It imports nothing that is slow before it can be interrupted: torch takes seconds,
and a package of its own is needed because importing any part of `refold` imports torch."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
from types import FrameType

_WORDS = {signal.SIGINT: "Interrupted", signal.SIGTERM: "Terminated"}


def main() -> int:
    """Run a command and return its exit code."""
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(importlib.metadata.version("refold") + "\n")
        return 0
    heard = [number for number in _WORDS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _leave) for number in heard}
    from refold.cli import main as run

    for number, handler in before.items():
        signal.signal(number, handler)
    return run()


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once: nothing was begun yet, and an exception could get lost in what is being imported."""
    sys.stderr.write(f"refold: {_WORDS[signal.Signals(number)]}: no folder was changed.\n")
    sys.stderr.flush()
    os._exit(128 + number)
