"""Numbers, kinds, layers and errors inside sentences; and quiet logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def counted(number: int, noun: str) -> str:
    """1 change, 2 changes."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def kind_of(thing: object) -> str:
    """a str, an int: what a thing is, by the name of its class."""
    name = type(thing).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def settings_of(layer: Any) -> str:
    """What a layer says of its settings; nothing where that has no end: torch's EmbeddingBag tells of all that lies in
    it, and torch.fx leaves its own forward there."""
    try:
        return str(layer.extra_repr())
    except RecursionError:
        return ""


def first_line(error: BaseException) -> str:
    """The error's type and the first line of its message, for use inside a sentence."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')[:300]}" if lines else type(error).__name__


def one_line(error: BaseException, most: int = 1200) -> str:
    """The error's whole message on one line, cut where it is longer than `most` characters."""
    text = " ".join(str(error).split()) or "it gave no reason."
    return text if len(text) < most else f"{text[:most]} …"


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Nothing below an error is logged under these names inside."""
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def byte_count(count: int) -> str:
    """Bytes in three digits and a unit."""
    for unit, unit_size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= unit_size:
            return f"{count / unit_size:.3g} {unit}"
    return f"{count} bytes"
