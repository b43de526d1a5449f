"""`refold explain`: what would be rewritten in a model, and why the rest is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text
from torch.fx import GraphModule

from refold.command_line.console import Console, grouped, number, printable, table
from refold.command_line.loaded_model import chosen_pipeline, prepare
from refold.command_line.options import Request
from refold.extension.plugins import name_of
from refold.record.outcome import Result
from refold.rewrite.preview import explain
from refold.rewrite.transformation import Transformation
from refold.wording import counted, one_line

_MOST_ROWS = 12


def explain_model(
    console: Console, request: Request, level: str, pipeline: Path | None, name: str | None, everything: bool
) -> None:
    """Try each transformation on what those before it left, and show the outcomes; nothing is written."""
    steps = chosen_pipeline(level, pipeline, name, device=request.device)
    loaded = prepare(request)
    gm = loaded.capture()
    outcomes = [(t, _outcome(gm, t)) for t in steps]
    data = {
        "subject": loaded.describe(),
        "nodes": len(gm.graph.nodes),
        "transformations": [_plain(t, outcome) for t, outcome in outcomes],
    }
    most = None if everything else _MOST_ROWS
    rewritten, refused = (sum(len(getattr(o, kind)) for _, o in outcomes) for kind in ("rewritten", "refused"))
    total = f"{counted(rewritten, 'place')} would be rewritten; left alone: {refused}. refold optimize does it."
    console.show(data, *(_part(t, outcome, most) for t, outcome in outcomes), total)


def _outcome(gm: GraphModule, transformation: Transformation) -> Result:
    try:
        outcome = explain(gm, transformation)
        if outcome:
            transformation(gm)  # later ones of a pipeline see what this one leaves
    except Exception as error:  # a plugin may raise anything; the module is as it was before
        note = f"It failed and was left out: {type(error).__name__}: {one_line(error)}"
        return Result(repr(transformation), note=note)
    return outcome


def _plain(transformation: Transformation, outcome: Result) -> dict[str, Any]:
    return {
        "name": name_of(transformation),
        "rewritten": [{"nodes": list(r.nodes), "what": r.what} for r in outcome.rewritten],
        "refused": [{"node": r.node, "reason": r.reason} for r in outcome.refused],
        "note": outcome.note,
    }


def _part(transformation: Transformation, outcome: Result, most: int | None) -> RenderableType:
    name = name_of(transformation)
    if not outcome.rewritten and not outcome.refused:
        return Group(Text(name, style="bold").append(Text(f"  {printable(outcome.note)}", style="dim")), Text())
    rows: list[tuple[object, ...]] = [("+", "", r.what) for r in outcome.rewritten[:most]]
    if most is not None and len(outcome.rewritten) > most:
        rows.append(("+", len(outcome.rewritten) - most, "more (--all shows them)"))
    refusals = grouped((r.node, r.reason) for r in outcome.refused)
    rows += [("-", count, f"{reason} ({names})") for count, reason, names in refusals]
    columns: list[str | Column] = ["", number("times"), "what would be rewritten (+) and why not (-)"]
    title = f"{name}: {len(outcome.rewritten)} to rewrite, {len(outcome.refused)} refused"
    return Group(table(title, columns, rows), Text())
