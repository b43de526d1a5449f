"""The arguments and options that several commands share, each described once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_MODEL = "A transformers folder or hub name, timm:NAME, FILE.py:FACTORY, or example:NAME (refold list names them)."
_SIZES = "Inputs"
_PLACE = "Machine"
_OUTPUT = "Output"


def _switch(name: str, help: str, panel: str | None = None) -> Any:
    """An option without a value."""
    return typer.Option(name, metavar="", help=help, rich_help_panel=panel)


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

Level = Annotated[
    str, typer.Option(help="safe (outputs stay bit-identical), default, or max (slow ways to run it are tried too).")
]
Pipeline = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A pipeline file (YAML) instead of the level's transformations.")
]
Backend = Annotated[str, typer.Option(help="auto, or the one executor to use (refold list names them).")]
TimeBudget = Annotated[
    float, typer.Option(metavar="SECONDS", min=0, help="Begin nothing new after this time; 0 is no limit.")
]
Overwrite = Annotated[bool, _switch("--overwrite", "Replace DIR if Refold wrote it.")]

AsJson = Annotated[bool, _switch("--json", "One JSON object on stdout and nothing else.", _OUTPUT)]
Debug = Annotated[bool, _switch("--debug", "Show the traceback of an error.", _OUTPUT)]
All = Annotated[bool, _switch("--all", "Shorten nothing.", _OUTPUT)]
