"""One command, run: how it ends is its exit code, an error is one sentence, and signals end it cleanly."""

from __future__ import annotations

import enum
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from refold.command_line.console import Console, quiet_stdout
from refold.errors import BadExample, BadPipeline, CaptureError, NeedsInputs, RefoldError, UnknownName, WrongInput
from refold.wording import one_line


class ExitCode(enum.IntEnum):
    """What the command returns to the shell, and what that means."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> ExitCode:
        member = int.__new__(cls, code)
        member._value_, member.meaning = code, meaning
        return member

    DONE = 0, "done"
    NO = 1, "the answer is no: verify found a wrong rewrite, undo gave other bits, bisect found a culprit"
    WRONG_INPUT = 2, "wrong usage or input: an option, a model, its inputs, a file, a folder (a damaged one too)"
    NOT_CAPTURED = 3, "the model could not be captured"
    FAILED = 4, "refused or failed, for a reason that the message says"
    UNEXPECTED = 5, "an unexpected error; --debug shows where"
    INTERRUPTED = 130, "interrupted (Ctrl-C); no folder was changed"
    UNREAD = 141, "the reader of the output (head, less) went away before its end"
    TERMINATED = 143, "terminated (SIGTERM); no folder was changed"


class Terminated(BaseException):
    """The process received SIGTERM."""


_WRONG_INPUT = (WrongInput, BadPipeline, UnknownName, NeedsInputs, BadExample)


def run(
    work: Callable[..., ExitCode | None],
    *arguments: object,
    as_json: bool = False,
    quiet: bool = False,
    debug: bool = False,
) -> int:
    """Do the work of a command with its arguments and return its exit code."""
    with quiet_stdout(as_json) as out, _termination():
        console = Console(as_json=as_json, quiet=quiet, out=out)
        try:
            return int(work(console, *arguments) or ExitCode.DONE)
        except BrokenPipeError:
            return unread()
        except (Exception, SystemExit, KeyboardInterrupt, Terminated) as error:
            if debug:
                traceback.print_exc()
            code, sentence = describe_error(error)
            log_error(console, code, sentence)
            return int(code)


def unread() -> int:
    """The exit code where the reader of stdout (head, less) has seen enough; what is left in buffers goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    return int(ExitCode.UNREAD)


def describe_error(error: BaseException) -> tuple[ExitCode, str]:
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


def log_error(console: Console, code: ExitCode, sentence: str) -> None:
    """Log in one sentence why a command ended; with --json, as an object too."""
    if console.as_json:
        console.show({"error": sentence, "exit_code": int(code)})
    console.log(f"refold: {sentence}")


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
