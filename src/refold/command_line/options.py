"""The arguments and options that several commands share, each described once, and what they say as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

_MODEL = "A transformers folder or hub name, timm:NAME, FILE.py:FACTORY, or example:NAME (refold list names them)."
_SIZES = "Inputs"
_PLACE = "Machine"
_OUTPUT = "Output"


def _switch(name: str, help: str, panel: str | None = None) -> Any:
    """An option without a value."""
    return typer.Option(name, help=help, rich_help_panel=panel)


def transformation_names(incomplete: str) -> list[str]:
    """What a shell completes the beginning of a transformation's name to."""
    from refold.rewrite.registry import find_plugins

    return [name for name in find_plugins().classes if name.startswith(incomplete)]


def _executor_names(incomplete: str) -> list[str]:
    from refold.executors import executors

    return [name for name in ("auto", *executors()) if name.startswith(incomplete)]


Model = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)]
Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A folder that refold optimize wrote.")]
NamedModel = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="The folder's model; needed where it came from FILE.py:FACTORY."),
]

InputsFrom = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        metavar="FILE.py:FUNCTION",
        help="A function that returns a dict, a tuple or a tensor; it may take the model.",
        rich_help_panel=_SIZES,
    ),
]
Batch = Annotated[int | None, typer.Option(min=1, help="Batch size (1).", rich_help_panel=_SIZES)]
SequenceLength = Annotated[int | None, typer.Option(min=1, help="Tokens in a text (128).", rich_help_panel=_SIZES)]
ImageSize = Annotated[
    int | None, typer.Option(min=1, help="Height and width of images (the model's own).", rich_help_panel=_SIZES)
]

Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:NUMBER (cpu).", rich_help_panel=_PLACE)]
Dtype = Annotated[
    str | None, typer.Option(help="float32, float16, bfloat16 or float64 (the model's own).", rich_help_panel=_PLACE)
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads (torch's choice).", rich_help_panel=_PLACE)]

Level = Annotated[str, typer.Option(help="safe (outputs stay bit-identical) or default.")]
Pipeline = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A pipeline file (YAML) instead of the level's transformations.")
]
Backend = Annotated[
    str,
    typer.Option(help="auto, or the one executor to use (refold list names them).", autocompletion=_executor_names),
]
Effort = Annotated[str, typer.Option(help="quick (seconds), default, or max (minutes: all is tried).")]
TimeBudget = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", min=0, help="Begin nothing that does not fit this time; 0 is no limit."),
]
MaxMemory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Choose no way that holds and needs more than that beside the model: 2GB."),
]
Overwrite = Annotated[bool, _switch("--overwrite", "Replace what Refold wrote into DIR before.")]

Original = Annotated[bool, _switch("--original", "Back to the files that SRC was converted from.")]
Verify = Annotated[bool, _switch("--verify", "Take back what was written, and compare every bit with SRC.")]

AsJson = Annotated[bool, _switch("--json", "One JSON object on stdout and nothing else.", _OUTPUT)]
Quiet = Annotated[bool, _switch("--quiet", "No progress: nothing on stderr but errors.", _OUTPUT)]
Debug = Annotated[bool, _switch("--debug", "Show the traceback of an error.", _OUTPUT)]
All = Annotated[bool, _switch("--all", "Shorten nothing.", _OUTPUT)]


# --- what the options say ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """How large the inputs are, where they are made from a configuration."""

    batch: int | None = None
    length: int | None = None
    image: int | None = None


NO_SIZES = Sizes()


@dataclass(frozen=True)
class Request:
    """Which model, on which inputs, and where."""

    model: str
    inputs: str | None = None
    sizes: Sizes = NO_SIZES
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None


@dataclass(frozen=True)
class OptimizeOptions:
    """What to do with a model, and where to put the result."""

    out: Path
    overwrite: bool
    level: str
    pipeline: Path | None
    backend: str
    effort: str
    time_budget: float | None
    max_memory: str | None


@dataclass(frozen=True)
class FolderOptions:
    """What a user says about a folder that the folder itself does not, or must not, say."""

    model: str | None = None
    inputs: str | None = None
    device: str | None = None
