"""`refold cache`: the decisions that are kept for later processes, where they lie, and how to be rid of them."""

from __future__ import annotations

import datetime
from typing import Any

from refold.command_line.console import Console, table
from refold.errors import BadDecision, WrongInput
from refold.optimization.cache_folder import OFF, VARIABLE, CacheFolder, Entry, cache_of_user
from refold.optimization.decision import Decision
from refold.wording import counted

_MEGA = 1e6


def show_cache(console: Console, clear: bool) -> None:
    """List what is kept, or delete it."""
    cache = cache_of_user()
    if cache is None:
        console.show({"folder": None, "entries": []}, f"Nothing is kept: {VARIABLE} is {OFF!r}, or there is no home.")
        return
    try:
        _clear(console, cache) if clear else _list(console, cache)
    except OSError as error:
        raise WrongInput(f"The cache cannot be used: {error.strerror}.") from None


def _clear(console: Console, cache: CacheFolder) -> None:
    count = cache.clear()
    console.show(
        {"folder": str(cache.path), "deleted": count}, f"{counted(count, 'decision')} deleted in {cache.path}."
    )


def _list(console: Console, cache: CacheFolder) -> None:
    rows = [_row(cache, entry) for entry in cache.entries()]
    total = sum(row["bytes"] for row in rows)
    shown = [(r["model"], r["runs"], r["rewrites"], r["left open"], r["used"], _mb(r["bytes"])) for r in rows]
    columns = ("model", "runs by", "rewrites", "left open", "last used", "MB")
    sentence = f"{counted(len(rows), 'decision')}, {_mb(total)} MB in {cache.path}"
    parts: list[Any] = [table("decisions, the most recently used first", columns, shown), ""] if rows else []
    console.show({"folder": str(cache.path), "entries": rows}, *parts, f"{sentence}; refold cache --clear deletes all.")


def _mb(size: int) -> str:
    return f"{size / _MEGA:.1f}"


def _row(cache: CacheFolder, entry: Entry) -> dict[str, Any]:
    """An entry as plain data."""
    used = datetime.datetime.fromtimestamp(entry.used).isoformat(" ", "minutes")
    row: dict[str, Any] = {"key": entry.key, "model": "damaged: ignored", "runs": "", "rewrites": "", "left open": ""}
    row |= {"used": used, "bytes": entry.size}
    try:
        decision = Decision.from_text(entry.text.read_bytes())
    except (OSError, BadDecision):
        return row
    ways = dict.fromkeys(name for name in (decision.at_example, decision.at_any_size) if name is not None)
    left = dict.fromkeys((*(each.name for each in decision.rounds), *decision.untried))
    row |= {"model": decision.report.model.class_name, "runs": ", ".join(ways), "rewrites": len(decision.steps)}
    return row | {"left open": ", ".join(left)}
