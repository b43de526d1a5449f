"""Saved folders for the tests of the command line, made without measuring: what is in them does not depend on time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from refold.command_line.folders import About, fill_folder, fingerprints, finish_folder
from refold.command_line.subject import Wanted, prepare
from refold.command_line.writing import ABOUT, new_folder
from refold.saving.folder import account_for
from refold.transformation import Transformation


def write_folder(place: Path, model: str, *transformations: Transformation) -> Path:
    """A folder as `refold optimize` leaves it, with every one of these transformations kept."""
    subject = prepare(Wanted(model))
    about = About(subject.source, subject.dtype, original=fingerprints(subject.model))
    gm = subject.capture()
    for transformation in transformations:
        transformation(gm)
    with new_folder(place, False) as folder:
        fill_folder(folder, gm, about, subject.inputs)
        finish_folder(folder, about)
    return place


def let_it_say(place: Path, **lies: Any) -> Path:
    """Make a folder say something else about itself, with digests that agree: anybody can write them."""
    data = json.loads((place / ABOUT).read_text()) | lies
    (place / ABOUT).write_text(json.dumps(data))
    account_for(place, ABOUT)
    return place
