"""`refold show`: what was done to a saved model, as + - ~ lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from refold.command_line.folders import About, Named, open_folder, read_about
from refold.command_line.screen import Screen, printable
from refold.command_line.wording import counted
from refold.history import history

_MOST_LINES = 12
_STYLES = {"+": "green", "-": "red", "~": "yellow"}


def show_folder(screen: Screen, folder: Path, named: Named, *, everything: bool) -> None:
    """Show the changes. A folder of `refold optimize` tells them itself; one that `refold.save` wrote, and any for
    which a model is named, is loaded and asked."""
    about = read_about(folder)
    changes = _replayed(folder, named) if about is None or named.model is not None else about.changes
    most = None if everything else _MOST_LINES
    parts: list[RenderableType | str] = []
    for number, change in enumerate(changes, 1):
        parts += _lines(number, change, most)
    held = sum(change["bytes"] for change in changes)
    total = f"{counted(len(changes), 'change')}; {held:,} bytes are held so that it can all be undone."
    data = {"folder": str(folder), "changes": changes, "bytes_held": held} | _origin(about)
    screen.show(data, _head(folder, about), *parts, total if changes else "Nothing is changed: this is the original.")


def _replayed(folder: Path, named: Named) -> list[dict[str, Any]]:
    gm = open_folder(folder, named).graph_module
    return [{"label": c.label, "bytes": c.nbytes, "lines": c.describe()} for c in history(gm)]


def _origin(about: About | None) -> dict[str, Any]:
    return {} if about is None else {"model": about.source.to_plain(), "run": about.run}


def _head(folder: Path, about: About | None) -> str:
    return f"{folder}" if about is None else f"{folder}: {about.source.kind} {about.source.name}, {about.dtype}"


def _lines(number: int, change: dict[str, Any], most: int | None) -> list[RenderableType | str]:
    parts: list[RenderableType | str] = [Text(printable(f"{number}. {change['label']}"), style="bold")]
    lines = change["lines"]
    for line in lines[:most]:
        parts.append(Text(printable(f"   {line}"), style=_STYLES.get(line[:1], "dim")))
    if most is not None and len(lines) > most:
        parts.append(Text(f"   … and {len(lines) - most} more lines (--all shows them)", style="dim"))
    return parts
