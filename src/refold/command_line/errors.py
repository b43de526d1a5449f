"""How a command ends: exit codes, and the errors that only the command line has."""

from __future__ import annotations

import enum

from refold.errors import RefoldError


class ExitCode(enum.IntEnum):
    """What the shell is told."""

    DONE = 0
    NO = 1
    WRONG_INPUT = 2
    NOT_CAPTURED = 3
    FAILED = 4
    UNEXPECTED = 5
    INTERRUPTED = 130
    UNREAD = 141
    TERMINATED = 143


MEANINGS: dict[ExitCode, str] = {
    ExitCode.DONE: "done",
    ExitCode.NO: "the answer is no: verify found a wrong rewrite, undo gave other bits, bisect found a culprit",
    ExitCode.WRONG_INPUT: "wrong usage or input: an option, a model, its inputs, a file, a folder (a damaged one too)",
    ExitCode.NOT_CAPTURED: "the model could not be captured",
    ExitCode.FAILED: "refused or failed, for a reason that the message says",
    ExitCode.UNEXPECTED: "an unexpected error; --debug shows where",
    ExitCode.INTERRUPTED: "interrupted (Ctrl-C); no folder was changed",
    ExitCode.UNREAD: "the reader of the output (head, less) went away before its end",
    ExitCode.TERMINATED: "terminated (SIGTERM); no folder was changed",
}


class WrongInput(RefoldError, ValueError):
    """What the user named cannot be used."""


class Terminated(BaseException):
    """The process was asked to end."""
