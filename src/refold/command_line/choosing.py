"""Which transformations a command uses: one that is named, those of a file, or those of a level."""

from __future__ import annotations

from pathlib import Path

from refold.command_line.errors import WrongInput
from refold.pipelines import read_pipeline
from refold.plugins import transformation_named
from refold.transformation import Transformation


def chosen(level: str, file: Path | None, name: str | None = None) -> tuple[Transformation, ...]:
    """The transformations, in order."""
    if name is not None:
        return (transformation_named(name)(),)
    from refold.optimizing.pipeline import BadLevel, default_pipeline

    try:
        usual = default_pipeline(level)
    except BadLevel as reason:
        raise WrongInput(str(reason)) from None
    return usual if file is None else read_pipeline(file)
