"""`refold list`: every transformation with its algebra, its kind and its promises."""

from __future__ import annotations

import inspect
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from refold.command_line.examples import EXAMPLES
from refold.command_line.screen import Screen, printable
from refold.command_line.tables import table
from refold.executors import executors, unavailable
from refold.pipelines import settings_of
from refold.plugins import Plugins, find_plugins, transformation_named
from refold.rewrite import Rewrite
from refold.transformation import ReversibleTransformation, Transformation

_REVERSE = {True: "reverse() and undo, bit for bit", False: "undo, bit for bit"}


def list_transformations(screen: Screen, name: str | None) -> None:
    """Show all of them, or one with its whole documentation; and what else commands take by name."""
    found = find_plugins()
    for problem in found.problems:
        screen.tell(str(problem))
    if name is not None:
        cls = transformation_named(name)
        data = describe(name, cls, found.origins.get(name, ""))
        screen.show(data, _block(data, data["documentation"]))
        return
    rows = [describe(key, cls, found.origins[key]) for key, cls in found.classes.items()]
    data = {"transformations": rows, "problems": _problems(found), "examples": _examples(), "executors": _executors()}
    blocks = [_block(row, row["summary"]) for row in rows]
    examples = table("examples (example:NAME)", ["name", "what it is"], _examples().items())
    runs = table("executors (--backend NAME)", ["name", "on this machine's CPU"], _executors().items())
    screen.show(data, *blocks, "", examples, "", runs)


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
        "settings": settings_of(cls),
        "summary": _summary(text),
        "documentation": text,
    }


def _summary(text: str) -> str:
    """The first paragraph, and the one after it if it holds the algebra."""
    first, *others = text.split("\n\n")
    return "\n".join(" ".join(part.split()) for part in (first, *(p for p in others[:1] if "`" in p)))


def _block(row: dict[str, Any], text: str) -> RenderableType:
    promises = ["computes the same" if row["preserves_computation"] else "changes what is computed"]
    promises.append(_REVERSE[row["reversible"]])
    facts = [row["kind"] or "any edits", *promises]
    if row["settings"]:
        facts.append("settings: " + ", ".join(f"{key}={value!r}" for key, value in row["settings"].items()))
    if row["origin"] not in ("", "refold"):
        facts.append(f"from {row['origin']}")
    head = Text(row["name"], style="bold").append(Text("  " + printable(" · ".join(facts)), style="dim"))
    return Group(head, Padding(Text(printable(text)), (0, 0, 1, 4)))


def _problems(found: Plugins) -> list[dict[str, str]]:
    return [{"name": p.name, "origin": p.origin, "reason": p.reason} for p in found.problems]


def _examples() -> dict[str, str]:
    return {example.name: example.about for example in EXAMPLES.values()}


def _executors() -> dict[str, str]:
    reasons = unavailable("cpu")
    return {name: reasons.get(name, "available") for name in executors()}
