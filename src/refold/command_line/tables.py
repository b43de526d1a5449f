"""Tables for the terminal; every cell is data and never markup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from refold.command_line.screen import printable


@dataclass(frozen=True)
class Column:
    """A heading, and whether the column holds numbers."""

    heading: str
    number: bool = False
    whole: bool = False
    """Whether its texts are never broken into lines."""


def table(title: str, columns: Sequence[str | Column], rows: Iterable[Sequence[object]]) -> Table:
    """A table of plain texts."""
    made = Table(title=Text(printable(title)), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for column in columns:
        column = Column(column) if isinstance(column, str) else column
        made.add_column(
            column.heading,
            justify="right" if column.number else "left",
            overflow="fold",
            no_wrap=column.number or column.whole,
        )
    for row in rows:
        made.add_row(*(Text(printable(str(cell))) for cell in row))
    return made


def grouped(pairs: Iterable[tuple[str, str]], most_names: int = 3) -> list[tuple[int, str, str]]:
    """(how many, reason, a few names) for each reason, the most frequent first."""
    names: dict[str, list[str]] = {}
    counts: Counter[str] = Counter()
    for name, reason in pairs:
        counts[reason] += 1
        names.setdefault(reason, []).append(name)
    rows = []
    for reason, count in counts.most_common():
        some = ", ".join(names[reason][:most_names])
        rows.append((count, reason, some if count <= most_names else f"{some}, …"))
    return rows
