"""From what optimizing did to the report that people read."""

from __future__ import annotations

import datetime
import inspect
import math
import os
import platform
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn
from torch.fx import GraphModule

from refold._version import __version__
from refold.change import Change
from refold.measure import Measurement, Timing
from refold.optimizing.choosing import ORIGINAL, Choice
from refold.optimizing.provenance import regions, trace_back
from refold.optimizing.steps import Step
from refold.report import data
from refold.report.graph import graph_data
from refold.rewrite import Rewrite
from refold.verify import Verification
from refold.verifying.results import GRADES


def build_report(
    model: nn.Module,
    graph_before: data.GraphData,
    gm: GraphModule | None,
    steps: list[Step],
    changes: list[tuple[int, Change]],
    choice: Choice,
    exactness: Verification | None,
    notes: list[str],
) -> data.Report:
    """Everything that was tried, as plain data."""
    origins, links = trace_back(changes)
    by_step = {number: [c for n, c in changes if n == number] for number in range(len(steps))}
    return data.Report(
        title=f"{type(model).__name__} by refold",
        model=data.ModelSummary(type(model).__name__, sum(p.numel() for p in model.parameters())),
        speedup=_speedup(choice),
        exactness=None if exactness is None else _exactness(exactness, choice),
        steps=tuple(_card(step, by_step[i]) for i, step in enumerate(steps)),
        timings=tuple(_bar(t, choice) for t in choice.comparison.ranked) if choice.comparison else (),
        executors=_executors(choice),
        machine=machine(),
        graph_before=graph_before,
        graph_after=data.GraphData() if gm is None else graph_data(gm, origins),
        links=links,
        notes=tuple(notes),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _speedup(choice: Choice) -> data.Ratio | None:
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
    sites = [data.Site(r.what, tuple(r.nodes), _after(r.nodes, places)) for r in step.result.rewritten]
    return data.RewriteCard(
        name=type(transformation).__name__,
        status=step.status,  # type: ignore[arg-type]
        kind=transformation.kind if isinstance(transformation, Rewrite) and transformation.kind != "graph" else "",
        signature=str(transformation.signature),
        algebra=_algebra(inspect.getdoc(type(transformation)) or ""),
        sites=tuple(sites),
        refusals=tuple(data.Refusal(r.node, r.reason) for r in step.result.refused),
        verification=None if step.verification is None else _verification(step.verification),
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


def _bar(timing: Timing, choice: Choice) -> data.TimingBar:
    low, high = timing.quartiles
    role: data.Role = "original" if timing.name == ORIGINAL else "refold" if timing.name == choice.name else "other"
    return data.TimingBar(timing.name, timing.median, low, high, choice.grades.get(timing.name, ""), role)


def _executors(choice: Choice) -> tuple[data.ExecutorRow, ...]:
    timings = {} if choice.comparison is None else choice.comparison.timings
    rows = []
    for name, timing in timings.items():
        if name != ORIGINAL:
            kind: data.Choice = "chosen" if name == choice.name else "tried"
            rows.append(data.ExecutorRow(name, kind, choice.grades.get(name, ""), timing.median))
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


def _exactness(found: Verification, choice: Choice) -> data.Verification:
    """How exact the result is as it runs: the rewritten graph, and the executor that runs it."""
    graph, run = found.summary(), choice.grades.get(choice.name, found.grade)
    if run not in GRADES or graph.grade not in GRADES or GRADES.index(run) <= GRADES.index(graph.grade):
        return graph
    return replace(graph, grade=run, sentence=f"{graph.sentence}; run by {choice.name}: {run}")


def _verification(found: Verification) -> data.Verification:
    return found.summary()
