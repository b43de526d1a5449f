"""Writing a folder whole or not at all: it is filled beside its place and moved there at the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from refold.command_line.errors import WrongInput

ABOUT = "about.json"
SCHEMA = "refold.folder"


def check_place(place: Path, overwrite: bool) -> None:
    """Refuse, before any work, a place where the folder cannot be put. Only what Refold wrote is ever replaced."""
    if place.exists() and not place.is_dir():
        raise WrongInput(f"{place} is a file, and a folder is to be written there. Choose another name.")
    if place.is_dir() and any(place.iterdir()):
        _check_ours(place)
        if not overwrite:
            raise WrongInput(f"{place} exists already. Choose another folder, or give --overwrite to replace it.")
    parent = next(p for p in place.absolute().parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise WrongInput(f"{place} cannot be written: {parent} is no folder that you may write to.")


def _check_ours(place: Path) -> None:
    try:
        about = json.loads((place / ABOUT).read_text(encoding="utf-8"))
        known = {*about["files"], ABOUT} if about.get("schema") == SCHEMA else set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        known = set()
    if not known:
        raise WrongInput(f"{place} exists already, and refold optimize did not write it. Choose another folder.")
    others = sorted(str(p.relative_to(place)) for p in place.rglob("*") if not p.is_dir())
    others = [name for name in others if name not in known]
    if others:
        raise WrongInput(f"{place} also holds {', '.join(others[:5])}, which Refold did not write: move it away first.")


@contextmanager
def new_folder(place: Path, overwrite: bool) -> Iterator[Path]:
    """An empty folder to fill; it takes its place when the block ends, and is gone if anything is raised in it."""
    check_place(place, overwrite)
    place = place.absolute()
    place.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{place.name}-", suffix=".partial", dir=place.parent))
    try:
        made.chmod(0o777 & ~umask())
        yield made
        with _signals_wait():
            _swap(made, place)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _swap(made: Path, place: Path) -> None:
    """Put a folder in place of another, and the other one back if that fails."""
    if not place.exists():
        made.rename(place)
        return
    old = made.with_suffix(".old")
    place.rename(old)
    try:
        made.rename(place)
    except BaseException:
        old.rename(place)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Between two renames no signal is let in; it is heard right after."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    before: dict[int, Any] = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in heard:
        os.kill(os.getpid(), number)


def umask() -> int:
    """The rights that new files do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
