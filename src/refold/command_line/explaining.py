"""`refold explain`: what would be rewritten in a model, and why the rest is left alone."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from torch.fx import GraphModule

from refold.command_line.running import one_line
from refold.command_line.screen import Screen, printable
from refold.command_line.subject import Subject
from refold.command_line.tables import Column, grouped, table
from refold.command_line.wording import counted
from refold.explaining import explain
from refold.plugins import name_of
from refold.result import Result
from refold.transformation import Transformation

_MOST_ROWS = 12


def explain_model(screen: Screen, subject: Subject, pipeline: tuple[Transformation, ...], *, everything: bool) -> None:
    """Try each transformation on what those before it left, and tell; nothing but memory is touched."""
    gm = subject.capture()
    outcomes = [(t, _outcome(gm, t)) for t in pipeline]
    data = {
        "subject": subject.describe(),
        "nodes": len(gm.graph.nodes),
        "transformations": [_plain(t, outcome) for t, outcome in outcomes],
    }
    most = None if everything else _MOST_ROWS
    parts = [_part(t, outcome, most) for t, outcome in outcomes]
    screen.show(data, *parts, _totals(outcomes))


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
    columns = [Column(""), Column("times", number=True), Column("what would be rewritten (+) and why not (-)")]
    return Group(table(_title(name, outcome), columns, rows), Text())


def _title(name: str, outcome: Result) -> str:
    return f"{name}: {len(outcome.rewritten)} to rewrite, {len(outcome.refused)} refused"


def _totals(outcomes: list[tuple[Transformation, Result]]) -> str:
    rewritten = sum(len(outcome.rewritten) for _, outcome in outcomes)
    refused = sum(len(outcome.refused) for _, outcome in outcomes)
    return f"{counted(rewritten, 'place')} would be rewritten; left alone: {refused}. refold optimize does it."
