"""How generated pages are written: only where they changed, so that a build without changes stays fast."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Write a page if it is new or differs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; bars and line breaks inside cells are made harmless."""
    lines = [list(head)]
    lines += [[cell.replace("\n", " ").replace("|", "\\|") for cell in row] for row in rows]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fenced(text: str, language: str) -> str:
    """A code block, fenced by more backticks than the text holds."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"
