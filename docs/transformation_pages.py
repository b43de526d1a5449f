"""One page for each transformation of this package, from its own docstring, settings and examples."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path

from generated_text import fenced, table, write
from torch.fx import GraphModule, symbolic_trace

import refold
from refold.optimization.default_pipeline import default_pipeline
from refold.rewrite.description import listed_settings
from refold.rewrite.registry import find_plugins
from refold.rewrite.rule import Rewrite

KINDS = {
    "structural": "Structural: weights are rearranged. The originals come back by slicing the current weights, so "
    "nothing is stored and whatever was trained is carried back.",
    "parametric": "Parametric: weights are computed with. The originals come back by the inverse and a small stored "
    "correction, bit for bit; numbers that were changed since come back by the inverse.",
    "graph": "Graph only: no weight is touched.",
}


def write_pages(folder: Path) -> None:
    """Write the index and the pages, and remove pages of transformations that are gone."""
    classes = built_in()
    rows = [(f"[{cls.__name__}]({cls.__name__}.md)", cls.kind, summary(cls)) for cls in classes]
    names = "\n".join(cls.__name__ for cls in classes)
    tried = ", ".join(f"`{type(t).__name__}`" for t in default_pipeline())
    index = (
        "# Transformations\n\nThese pages are generated from the transformations' own docstrings and examples. "
        f"[`refold.optimize`](../optimizing.md) tries, in this order: {tried}.\n\n"
        f"{table(('name', 'kind', 'what it does'), rows)}\n\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"
    )
    write(folder / "index.md", index)
    for cls in classes:
        write(folder / f"{cls.__name__}.md", page(cls))
    for path in folder.glob("*.md"):
        if path.stem not in {"index", *(cls.__name__ for cls in classes)}:
            path.unlink()


def built_in() -> list[type[Rewrite]]:
    """The rewrites that Refold itself defines, by name."""
    found = find_plugins()
    ours = [cls for name, cls in found.classes.items() if found.origins[name] == "refold"]
    return sorted((cls for cls in ours if issubclass(cls, Rewrite)), key=lambda cls: cls.__name__)


def summary(cls: type[Rewrite]) -> str:
    """The first sentence of the docstring, in one line."""
    paragraph = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")
    return paragraph.split(". ")[0].rstrip(".") + "."


def page(cls: type[Rewrite]) -> str:
    """Everything about one transformation."""
    parts = [f"# {cls.__name__}", algebra_on_its_own_lines(inspect.getdoc(cls) or ""), KINDS[cls.kind]]
    parts += [ways_back(cls), imported_from(cls), settings(cls), example(cls)]
    return "\n\n".join(part for part in parts if part) + "\n"


def algebra_on_its_own_lines(text: str) -> str:
    """Docstrings set formulas on lines of their own, which Markdown would run together."""
    lines = [line + "\\" if line.endswith(";") and line.startswith("`") else line for line in text.splitlines()]
    return "\n".join(lines)


def ways_back(cls: type[Rewrite]) -> str:
    if issubclass(cls, refold.ReversibleTransformation):
        return "It is reversed by `t(gm, reverse=True)` or by `refold.undo(gm)`."
    return "It is a plain `Transformation`, without `reverse`; `refold.undo(gm)` restores it all the same."


def imported_from(cls: type[Rewrite]) -> str:
    where = "refold" if hasattr(refold, cls.__name__) else cls.__module__
    return fenced(f"from {where} import {cls.__name__}", "python")


def settings(cls: type[Rewrite]) -> str:
    rows = [(f"`{name}`", f"`{default!r}`") for name, default in listed_settings(cls).items()]
    return f"## Settings\n\n{table(('setting', 'default'), rows)}" if rows else ""


def example(cls: type[Rewrite]) -> str:
    """What the first example's graph looks like before and after, and what is said about it."""
    model, _inputs = next(iter(cls.examples()))
    gm = model if isinstance(model, GraphModule) else symbolic_trace(copy.deepcopy(model))
    before = gm.code.strip()
    cls()(gm)
    lines = "\n".join(line for change in refold.history(gm) for line in change.describe())
    blocks = [
        ("Before", before, "python"),
        ("After", gm.code.strip(), "python"),
        ("What it says (`refold.result(gm)`)", str(refold.result(gm)), "text"),
        ("What changed (`refold.history(gm)`)", lines, "text"),
    ]
    return "## Example\n\n" + "\n\n".join(f"{title}:\n\n{fenced(text, kind)}" for title, text, kind in blocks)
