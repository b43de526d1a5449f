"""Saved folders for the tests of the command line, made without measuring: what is in them does not depend on time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from refold.command_line.loaded_model import prepare
from refold.command_line.options import Request
from refold.command_line.saved_folder import ABOUT, About, fingerprints
from refold.command_line.saved_folder import write_folder as write
from refold.rewrite.transformation import Transformation
from refold.saving.folder import seal


def write_folder(place: Path, model: str, *transformations: Transformation) -> Path:
    """A folder as `refold optimize` leaves it, with every one of these transformations kept."""
    subject = prepare(Request(model))
    about = About(subject.source, subject.dtype, original=fingerprints(subject.model))
    gm = subject.capture()
    for transformation in transformations:
        transformation(gm)
    write(place, gm, about, subject.inputs)
    return place


def let_it_say(place: Path, **lies: Any) -> Path:
    """Make a folder say something else about itself, with digests that agree: anybody can write them."""
    data = json.loads((place / ABOUT).read_text()) | lies
    (place / ABOUT).write_text(json.dumps(data))
    seal(place)
    return place
