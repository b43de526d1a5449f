"""The `refold` command; and, for a user's own checks, the model and the inputs that a saved folder holds."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.fx import GraphModule


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; `refold --help` documents both."""
    try:
        from refold.command_line.app import main as run
    except ImportError as missing:
        if missing.name not in ("typer", "click", "rich"):
            raise
        sys.stderr.write("refold: the command line needs typer and rich: pip install typer rich pyyaml safetensors\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return run(arguments)


def open_model(folder: str | os.PathLike[str], model: str | None = None) -> GraphModule:
    """The rewritten model of a folder of `refold optimize`, with its history. `model` names it again, as the command
    line does, where it came from FILE.py:FACTORY; code that a folder names is never run."""
    from refold.command_line.options import FolderOptions
    from refold.command_line.saved_folder import open_folder

    return open_folder(Path(folder), FolderOptions(model)).graph_module


def open_inputs(folder: str | os.PathLike[str]) -> dict[str, Any] | tuple[Any, ...]:
    """The inputs that the model in a folder was optimized for: keyword arguments, or positional ones."""
    from refold.command_line.saved_folder import read_inputs

    inputs = read_inputs(Path(folder))
    return inputs.kwargs or inputs.args


if __name__ == "__main__":
    sys.exit(main())
