"""`refold optimize`: the main job, with its progress, its tables and the folder that it leaves."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from torch.fx import GraphModule

from refold.command_line.choosing import chosen
from refold.command_line.errors import ExitCode, WrongInput
from refold.command_line.folders import About, fill_folder, fingerprints, finish_folder
from refold.command_line.progress import told
from refold.command_line.screen import Screen
from refold.command_line.subject import Subject, Wanted, chosen_device, prepare
from refold.command_line.tables import Column, grouped, table
from refold.command_line.writing import check_place, new_folder
from refold.executors import executor_named
from refold.executors.base import why_unavailable
from refold.optimize import optimize
from refold.optimizing.optimized import OptimizedModule
from refold.pipelines import pipeline_to_text, write_pipeline
from refold.report.data import Report, RewriteCard
from refold.report.text import changed_sentence, duration, exactness_sentence, model_sentence, speed_sentence
from refold.saving import SaveError
from refold.transformation import Transformation

REPORT = "report.html"


@dataclass(frozen=True)
class Order:
    """What to do with a model, and where to put it."""

    out: Path
    overwrite: bool
    level: str
    pipeline: Path | None
    backend: str
    time_budget: float | None


def optimize_model(screen: Screen, wanted: Wanted, order: Order) -> ExitCode:
    """Optimize a model and write the folder. Whatever can be refused is refused before the work begins."""
    check_place(order.out, order.overwrite)
    steps = chosen(order.level, order.pipeline)
    pipeline_to_text(steps)
    _check_backend(order.backend, chosen_device(wanted.device))
    start = time.monotonic()
    with told(screen) as tell:
        tell(f"loading {wanted.model}", 0.0)
        subject = prepare(wanted)
        original = fingerprints(subject.model)
        fast = _optimized(subject, steps, order, tell)
    report = fast.report
    if fast.graph_module is None:
        screen.show(_plain(report) | {"error": " ".join(report.notes)}, *_tables(report))
        screen.tell(f"refold: {' '.join(report.notes)} There is no graph to save, so nothing was written.")
        return ExitCode.NOT_CAPTURED
    about = About(subject.source, subject.dtype, original=original, run=_run(subject, fast, order))
    try:
        _write(fast.graph_module, about, subject, report, steps, order)
    except SaveError as reason:  # the work was long: what it found is told all the same
        screen.show(_plain(report) | {"error": str(reason)}, *_tables(report))
        screen.tell(f"refold: The result could not be saved: {reason}")
        return ExitCode.FAILED
    _show(screen, subject, report, order.out, time.monotonic() - start)
    return ExitCode.DONE


def _check_backend(name: str, device: torch.device) -> None:
    if name == "auto":
        return
    reason = why_unavailable(executor_named(name), device)
    if reason is not None:
        raise WrongInput(f"--backend {name} cannot be used here: {reason}.")


def _write(
    gm: GraphModule,
    about: About,
    subject: Subject,
    report: Report,
    steps: tuple[Transformation, ...],
    order: Order,
) -> None:
    with new_folder(order.out, order.overwrite) as folder:
        fill_folder(folder, gm, about, subject.inputs)
        report.write_html(folder / REPORT)
        (folder / "report.json").write_text(report.to_json(), encoding="utf-8")
        write_pipeline(steps, folder / "pipeline.yaml")
        finish_folder(folder, about)


def _optimized(subject: Subject, steps: tuple[Transformation, ...], order: Order, tell: Any) -> OptimizedModule:
    return optimize(
        subject.model,
        subject.inputs,
        level=order.level,
        pipeline=steps,
        backend=order.backend,
        time_budget=order.time_budget,
        progress=tell,
    )


def _run(subject: Subject, fast: OptimizedModule, order: Order) -> dict[str, Any]:
    """How the folder came about, for people who find it later."""
    settings = {"level": order.level, "backend": order.backend, "executor": fast.variants[0].executor}
    return subject.describe() | settings | {"report": REPORT, "created": fast.report.created}


def _show(screen: Screen, subject: Subject, report: Report, out: Path, seconds: float) -> None:
    data = {"folder": str(out), "page": str(out / REPORT), "seconds": round(seconds, 1)}
    where = f"saved in {out} after {seconds:.0f} s; the report is {(out / REPORT).absolute()}"
    screen.show(data | {"subject": subject.describe()} | _plain(report), *_tables(report), "", where)


def _plain(report: Report) -> dict[str, Any]:
    """The report without its graphs; report.json in the folder has all of it."""
    ratio = report.speedup
    return {
        "speedup": None if ratio is None else {"median": ratio.median, "low": ratio.low, "high": ratio.high},
        "exactness": None if report.exactness is None else {"grade": report.exactness.grade, "ok": report.exactness.ok},
        "nodes": {"before": len(report.graph_before), "after": len(report.graph_after)},
        "steps": [_plain_step(step) for step in report.steps],
        "timings": [{"name": t.name, "median_s": t.median, "low_s": t.low, "high_s": t.high} for t in report.timings],
        "executors": [{"name": e.name, "choice": e.choice, "why": e.why} for e in report.executors],
        "notes": list(report.notes),
    }


def _plain_step(step: RewriteCard) -> dict[str, Any]:
    return {
        "name": step.name,
        "status": step.status,
        "sites": len(step.sites),
        "refused": len(step.refusals),
        "gain": None if step.gain is None else step.gain.median,
        "exactness": None if step.verification is None else step.verification.grade,
        "note": step.note,
    }


def _tables(report: Report) -> list[RenderableType | str]:
    facts = [
        ("speed", speed_sentence(report.speedup)),
        ("exactness", exactness_sentence(report.exactness)),
        ("changed", changed_sentence(report)),
        ("model", model_sentence(report)),
    ]
    parts: list[RenderableType | str] = [table(report.title, ["", ""], facts), ""]
    parts += [table("transformations", _STEP_COLUMNS, [_row(step) for step in report.steps]), ""]
    if report.executors or report.timings:
        parts.append(table("ways to run it", _RUN_COLUMNS, _runs(report)))
    return parts + _left_out(report) + [f"note: {note}" for note in report.notes]


_STEP_COLUMNS: list[str | Column] = [
    Column("transformation", whole=True),
    "outcome",
    Column("sites", number=True),
    Column("refused", number=True),
    Column("speed", number=True),
    "exactness",
]
_RUN_COLUMNS: list[str | Column] = [
    "",
    Column("name", whole=True),
    Column("median", number=True),
    Column("quartiles", number=True),
    "note",
]


def _row(step: RewriteCard) -> tuple[object, ...]:
    gain = "" if step.gain is None else f"{step.gain.median:.2f}×"
    became = f"{step.status}: {step.note}" if step.note else step.status
    grade = "" if step.verification is None else step.verification.grade
    return step.name, became, len(step.sites) or "", len(step.refusals) or "", gain, grade


def _runs(report: Report) -> list[tuple[object, ...]]:
    chosen_names = {row.name for row in report.executors if row.choice == "chosen"}
    rows: list[tuple[object, ...]] = []
    for bar in report.timings:
        mark = "chosen" if bar.name in chosen_names else ""
        quartiles = f"{duration(bar.low)} – {duration(bar.high)}"
        rows.append((mark, bar.name, duration(bar.median), quartiles, bar.note))
    return rows


def _left_out(report: Report) -> list[str]:
    """The executors that were not timed, in one line for each reason."""
    timed = {bar.name for bar in report.timings}
    reasons = grouped(((row.name, row.why) for row in report.executors if row.name not in timed), most_names=99)
    return [f"not tried: {names} ({why})" for _, why, names in reasons]
