"""The way from the shell to a command and back: arguments in, an exit code out."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import typer

from refold.command_line.app import app
from refold.command_line.errors import ExitCode
from refold.command_line.running import tell_error, unread
from refold.command_line.screen import Screen, ready_streams

# typer has a click of its own in some versions; what it raises for wrong usage is the base of this in all of them
UsageError: Any = typer.BadParameter.__base__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command."""
    _quieten()
    ready_streams()
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except (typer.Abort, KeyboardInterrupt):
        return int(ExitCode.INTERRUPTED)
    except (BrokenPipeError, SystemExit):  # typer and rich exit so where nobody reads their help
        return unread()


def _run(arguments: list[str]) -> int:
    try:
        return int(app(args=arguments, standalone_mode=False) or 0)
    except UsageError as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # the help was shown already
            command = error.ctx.command_path if error.ctx is not None else "refold"
            sentence = f"{error.format_message()} ({command} --help tells more)"
            tell_error(Screen(as_json="--json" in arguments), ExitCode.WRONG_INPUT, sentence)
        return int(ExitCode.WRONG_INPUT)


def _quieten() -> None:
    """Other packages' chatter is not for the people who run a command; --debug and errors tell what matters."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.simplefilter("ignore")
    for name in ("torch", "torch.onnx", "onnxscript", "onnx_ir", "transformers", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what they log as an error, they also raise
