"""Running a command: its result, its errors as one sentence, its exit code, and what signals do."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from refold.capturing.errors import CaptureError, NeedsInputs
from refold.command_line.errors import ExitCode, Terminated, WrongInput
from refold.command_line.screen import Screen, quiet_stdout
from refold.errors import RefoldError
from refold.executors import UnknownExecutor
from refold.optimizing.calls import BadExample
from refold.pipelines import BadPipeline
from refold.plugins import UnknownTransformation

_WRONG_INPUT = (WrongInput, BadPipeline, UnknownTransformation, UnknownExecutor, NeedsInputs, BadExample)

Work = Callable[[Screen], ExitCode | None]


def run(work: Work, *, as_json: bool = False, debug: bool = False) -> int:
    """Do the work of a command and say how it ended."""
    with quiet_stdout(as_json) as out, _termination():
        screen = Screen(as_json=as_json, out=out)
        try:
            return int(work(screen) or ExitCode.DONE)
        except BrokenPipeError:
            return unread()
        except (Exception, SystemExit, KeyboardInterrupt, Terminated) as error:
            if debug:
                traceback.print_exc()
            code, sentence = explain(error)
            tell_error(screen, code, sentence)
            return int(code)


def unread() -> int:
    """The exit code where the reader of stdout (head, less) has seen enough; what is left in buffers goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return int(ExitCode.UNREAD)


def explain(error: BaseException) -> tuple[ExitCode, str]:
    """The exit code of an error, and its sentence."""
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, "Interrupted: no folder was changed."
    if isinstance(error, Terminated):
        return ExitCode.TERMINATED, "Terminated: no folder was changed."
    if isinstance(error, _WRONG_INPUT):
        return ExitCode.WRONG_INPUT, one_line(error)
    if isinstance(error, CaptureError):
        return ExitCode.NOT_CAPTURED, one_line(error)
    if isinstance(error, RefoldError):
        return ExitCode.FAILED, one_line(error)
    if isinstance(error, OSError):
        return ExitCode.FAILED, f"{error.filename or 'A file'} cannot be used: {error.strerror or error}."
    return ExitCode.UNEXPECTED, f"Unexpected {type(error).__name__}: {one_line(error)} (--debug shows where)"


def one_line(error: BaseException) -> str:
    """What an error says, on one line and not endless."""
    text = " ".join(str(error).split()) or "it gave no reason."
    return text if len(text) < 1200 else f"{text[:1200]} …"


def tell_error(screen: Screen, code: ExitCode, sentence: str) -> None:
    """Say in one sentence why a command ended; with --json, as an object too."""
    if screen.as_json:
        screen.show({"error": sentence, "exit_code": int(code)})
    screen.tell(f"refold: {sentence}")


@contextmanager
def _termination() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does, so that what it was writing is cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
