"""One page for each registered transformation, from its own docstring, settings and examples."""

from __future__ import annotations

import copy
import inspect
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

import torch

import refold
import refold.transformations  # so that every class is registered
from refold.rewrite import Rewrite, registered

KINDS = {
    "structural": "Structural: the weights are rearranged; the originals come back by slicing the current ones.",
    "parametric": "Parametric: the weights are computed with; the originals come back by an inverse and a stored correction.",
    "graph": "Graph only: no weight is touched.",
}


def write_pages(folder: Path) -> None:
    """Write the index and the pages, only where they changed, so that unchanged builds stay fast."""
    folder.mkdir(exist_ok=True)
    classes = sorted((c for c in registered() if c.__module__.startswith("refold.")), key=lambda c: c.__name__)
    entries = "\n".join(c.__name__ for c in classes)
    rows = "\n".join(f"| [{c.__name__}]({c.__name__}.md) | {c.kind} | {summary(c)} |" for c in classes)
    index = f"# Transformations\n\n| name | kind | what it does |\n|---|---|---|\n{rows}\n\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n"
    write(folder / "index.md", index)
    for cls in classes:
        write(folder / f"{cls.__name__}.md", page(cls))


def write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def summary(cls: type[Rewrite]) -> str:
    return (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def page(cls: type[Rewrite]) -> str:
    reversible = issubclass(cls, refold.ReversibleTransformation)
    back = "`t(gm, reverse=True)` and `refold.undo(gm)`" if reversible else "`refold.undo(gm)`"
    parts = [f"# {cls.__name__}", inspect.getdoc(cls) or "", KINDS[cls.kind], f"Reversed by {back}.", settings(cls), example(cls)]
    return "\n\n".join(part for part in parts if part) + "\n"


def settings(cls: type[Rewrite]) -> str:
    if not is_dataclass(cls) or not fields(cls):
        return ""
    rows = [f"| `{f.name}` | `{'' if f.default is MISSING else repr(f.default)}` |" for f in fields(cls)]
    return "## Settings\n\n| setting | default |\n|---|---|\n" + "\n".join(rows)


def example(cls: type[Rewrite]) -> str:
    """What the first example's graph looks like before and after."""
    for model, _inputs in cls.examples():
        gm = model if isinstance(model, torch.fx.GraphModule) else torch.fx.symbolic_trace(copy.deepcopy(model))
        before = gm.code.strip()
        cls()(gm)
        lines = "\n".join(line for change in refold.history(gm) for line in change.describe())
        blocks = [("before", before, "python"), ("after", gm.code.strip(), "python"), ("what changed", lines, "text")]
        return "## Example\n\n" + "\n\n".join(f"{t}:\n\n```{k}\n{b}\n```" for t, b, k in blocks)
    return ""
