"""From what optimizing did to the report that people read."""

from __future__ import annotations

import datetime
import inspect
import math
import os
import platform
from collections import defaultdict
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn

from refold._version import __version__
from refold.graph.groups import connected
from refold.measurement.timing import Measurement, Timing
from refold.optimization.choice import ORIGINAL, ExecutorChoice
from refold.optimization.memory import Memory
from refold.optimization.steps import Rewritten, Step
from refold.record.change import Change, refs_in
from refold.report import data
from refold.report.data import NodeLink
from refold.report.document import Report
from refold.report.graph_nodes import graph_data
from refold.rewrite.rule import Rewrite
from refold.verification.verdicts import GRADES, Verification


def build_report(model: nn.Module, rewritten: Rewritten | None, choice: ExecutorChoice, notes: list[str]) -> Report:
    """Everything that was tried, as plain data; without `rewritten`, the model could not be compared with anything."""
    steps, changes = ([], []) if rewritten is None else (rewritten.steps, rewritten.changes)
    gm, exactness = (None, None) if rewritten is None else (rewritten.gm, rewritten.exactness)
    origins, links = trace_back(changes)
    by_step = {number: [c for n, c in changes if n == number] for number in range(len(steps))}
    return Report(
        title=f"{type(model).__name__} by refold",
        model=data.ModelSummary(type(model).__name__, sum(p.numel() for p in model.parameters())),
        speedup=_speedup(choice),
        exactness=None if exactness is None else _exactness(exactness, choice),
        steps=tuple(_card(step, by_step[i]) for i, step in enumerate(steps)),
        timings=tuple(_bar(t, choice) for t in choice.comparison.ranked) if choice.comparison else (),
        executors=_executors(choice),
        machine=machine(),
        graph_before=data.GraphData() if rewritten is None else rewritten.before,
        graph_after=data.GraphData() if gm is None else graph_data(gm, origins),
        links=links,
        notes=tuple(notes),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _speedup(choice: ExecutorChoice) -> data.Ratio | None:
    if choice.comparison is None or choice.name == ORIGINAL:
        return None if choice.comparison is None else data.Ratio(1.0, 1.0, 1.0)
    return _ratio(choice.comparison.between(ORIGINAL, choice.name))


def _ratio(measured: Measurement) -> data.Ratio:
    """The ratio with its interval. Too few rounds for one tell nothing: it then reaches from 1 to the extremes."""
    low, high = measured.interval
    if low == 0 or not math.isfinite(high):
        low, high = min(*measured.ratios, 1.0), max(*measured.ratios, 1.0)
    return data.Ratio(measured.ratio, low, high)


def _card(step: Step, changes: list[Change]) -> data.RewriteCard:
    transformation, measured = step.transformation, step.measurement
    places = [place for change in changes for place in regions(change)]
    sites = [data.SiteRow(r.what, tuple(r.nodes), _after(r.nodes, places)) for r in step.result.rewritten]
    return data.RewriteCard(
        name=type(transformation).__name__,
        status=step.status,  # type: ignore[arg-type]
        kind=transformation.kind if isinstance(transformation, Rewrite) and transformation.kind != "graph" else "",
        signature=str(transformation.signature),
        algebra=_algebra(inspect.getdoc(type(transformation)) or ""),
        sites=tuple(sites),
        refusals=tuple(data.RefusalRow(r.node, r.reason) for r in step.result.refused),
        verification=None if step.verification is None else summary_of(step.verification),
        gain=None if measured is None else _ratio(measured),
        note=step.note,
    )


def _algebra(text: str) -> str:
    """The first sentence of a docstring, and its paragraphs with formulas."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(paragraphs[:1] + [p for p in paragraphs[1:] if "`" in p and ("=" in p or "becomes" in p)])


def _after(nodes: tuple[str, ...], places: list[tuple[frozenset[str], frozenset[str]]]) -> tuple[str, ...]:
    found = [after for before, after in places if before.intersection(nodes)]
    return tuple(sorted(frozenset().union(*found)))


def _bar(timing: Timing, choice: ExecutorChoice) -> data.TimingBar:
    low, high = timing.quartiles
    role: data.Role = "original" if timing.name == ORIGINAL else "refold" if timing.name == choice.name else "other"
    return data.TimingBar(timing.name, timing.median, low, high, choice.grades.get(timing.name, ""), role)


def _executors(choice: ExecutorChoice) -> tuple[data.ExecutorRow, ...]:
    timings = {} if choice.comparison is None else choice.comparison.timings
    rows = []
    for name, timing in timings.items():
        if name != ORIGINAL:
            kind: data.ExecutorStatus = "chosen" if name == choice.name else "tried"
            memory = choice.memory.get(name, Memory())
            grade = choice.grades.get(name, "")
            rows.append(data.ExecutorRow(name, kind, grade, timing.median, memory.held, memory.peak))
    return (*rows, *(data.ExecutorRow(name, "not tried", why) for name, why in choice.left_out.items()))


def machine() -> data.Machine:
    """What the numbers were measured on."""
    place = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    text = (
        f"{place}{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {platform.system()}"
    )
    names = ("torch", "transformers", "onnxruntime", "openvino")
    found = [("refold", __version__), ("python", platform.python_version())]
    return data.Machine(text, (*found, *((n, v) for n in names if (v := _version(n)) is not None)))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _exactness(found: Verification, choice: ExecutorChoice) -> data.ExactnessSummary:
    """How exact the result is as it runs: the rewritten graph, and the executor that runs it."""
    graph, run = summary_of(found), choice.grades.get(choice.name, found.grade)
    if run not in GRADES or graph.grade not in GRADES or GRADES.index(run) <= GRADES.index(graph.grade):
        return graph
    return replace(graph, grade=run, sentence=f"{graph.sentence}; run by {choice.name}: {run}")


def regions(change: Change) -> list[tuple[frozenset[str], frozenset[str]]]:
    """(nodes before, nodes after) of each separate place that a change touched. A node that is only a reader of a
    place, and was adjusted to what it reads now, is not part of it."""
    named = {name for site in change.sites for name in site.nodes}
    rewired = {n for n, (a, b) in change.changed.items() if a.op == b.op and a.target == b.target}
    part = [n for n in change.changed if n in named or (not named and n not in rewired)]
    touched = {*change.created, *change.erased, *part}
    records = [*change.created.items(), *change.erased.items()]
    records += [(n, r) for n, pair in change.changed.items() for r in pair]
    links = [[n for n in (name, *(ref[1:] for ref in refs_in(record))) if n in touched] for name, record in records]
    places = connected([*([name] for name in touched), *links])
    before = {*change.erased, *change.changed}
    after = {*change.created, *change.changed}
    return [(frozenset(place & before), frozenset(place & after)) for place in places]


def trace_back(changes: list[tuple[int, Change]]) -> tuple[dict[str, tuple[str, ...]], tuple[NodeLink, ...]]:
    """Origins of each touched node of the final graph, and links between both graphs; changes come with their steps."""
    origins: dict[str, frozenset[str]] = {}
    steps: dict[str, frozenset[int]] = {}
    gone: dict[str, frozenset[int]] = {}
    for number, change in changes:
        for before, after in regions(change):
            source = frozenset().union(*(origins.get(name, frozenset({name})) for name in before))
            taken = frozenset({number}).union(*(steps.get(name, frozenset()) for name in before))
            for name in after:
                origins[name], steps[name] = source, taken
            if not after:
                gone |= dict.fromkeys(source, taken)
        for name in change.erased:
            origins.pop(name, None)
    groups: dict[frozenset[str], list[str]] = defaultdict(list)
    for name, source in origins.items():
        groups[source].append(name)
    links = [
        NodeLink(tuple(sorted(source)), tuple(names), tuple(sorted(frozenset().union(*(steps[n] for n in names)))))
        for source, names in groups.items()
    ]
    links += [NodeLink((name,), (), tuple(sorted(taken))) for name, taken in gone.items()]
    return {name: tuple(sorted(source)) for name, source in origins.items()}, tuple(links)


def summary_of(found: Verification) -> data.ExactnessSummary:
    """The short form that a report shows. Of steps the outputs are graded once, at the end."""
    grade = found.grade if found.outputs or not found.sites or not found.right else "right"
    errors = tuple(data.OutputError(o.name, o.error, o.baseline, o.sentence) for o in found.outputs)
    return data.ExactnessSummary(grade, found.sentence_of_sites, found.right, errors)
