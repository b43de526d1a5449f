"""`refold list`: every transformation with its algebra, its kind and its promises."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from refold.command_line.builtin_models import EXAMPLES
from refold.command_line.console import Console, printable, table
from refold.executors import executors, unavailable
from refold.extension.plugins import problems, transformation_named
from refold.rewrite.description import listed_settings
from refold.rewrite.registry import find_plugins
from refold.rewrite.rule import Rewrite
from refold.rewrite.transformation import ReversibleTransformation, Transformation


def list_transformations(console: Console, name: str | None) -> None:
    """Show all of them, or one with its whole documentation; and what else commands take by name."""
    found = find_plugins()
    left_out = problems()
    for problem in left_out:
        console.log(str(problem))
    if name is not None:
        cls = transformation_named(name)
        data = describe(name, cls, found.origins.get(name, ""))
        console.show(data, _block(data, data["documentation"]))
        return
    examples = {example.name: example.about for example in EXAMPLES.values()}
    reasons = unavailable("cpu")
    engines = {key: reasons.get(key, "available") for key in executors()}
    rows = [describe(key, cls, found.origins[key]) for key, cls in found.classes.items()]
    data = {
        "transformations": rows,
        "problems": [asdict(problem) for problem in left_out],
        "examples": examples,
        "executors": engines,
    }
    blocks = [_block(row, row["summary"]) for row in rows]
    models = table("examples (example:NAME)", ["name", "what it is"], examples.items())
    ways = table("executors (--backend NAME)", ["name", "on this machine's CPU"], engines.items())
    console.show(data, *blocks, "", models, "", ways)


def describe(name: str, cls: type[Transformation], origin: str) -> dict[str, Any]:
    """A transformation as plain data."""
    text = inspect.getdoc(cls) or ""
    return {
        "name": name,
        "origin": origin,
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "kind": cls.kind if issubclass(cls, Rewrite) else "",
        "preserves_computation": bool(cls().preserves_computation),
        "reversible": issubclass(cls, ReversibleTransformation),
        "settings": listed_settings(cls),
        "summary": _summary(text),
        "documentation": text,
    }


def _summary(text: str) -> str:
    """The first paragraph, and the one after it if it holds the algebra."""
    first, *others = text.split("\n\n")
    return "\n".join(" ".join(part.split()) for part in (first, *(p for p in others[:1] if "`" in p)))


def _block(row: dict[str, Any], text: str) -> RenderableType:
    facts = [row["kind"] or "any edits"]
    facts.append("computes the same" if row["preserves_computation"] else "changes what is computed")
    facts.append("reverse() and undo, bit for bit" if row["reversible"] else "undo, bit for bit")
    if row["settings"]:
        facts.append("settings: " + ", ".join(f"{key}={value!r}" for key, value in row["settings"].items()))
    if row["origin"] not in ("", "refold"):
        facts.append(f"from {row['origin']}")
    head = Text(row["name"], style="bold").append(Text("  " + printable(" · ".join(facts)), style="dim"))
    return Group(head, Padding(Text(printable(text)), (0, 0, 1, 4)))
