"""`refold optimize`: the main job, with its progress, its report and the folder that it leaves."""

from __future__ import annotations

import time
from typing import Any

import torch

from refold.command_line.console import Console, progress
from refold.command_line.execution import ExitCode
from refold.command_line.loaded_model import LoadedModel, chosen_device, chosen_pipeline, prepare
from refold.command_line.options import OptimizeOptions, Request
from refold.command_line.saved_folder import About, check_place, fingerprints, write_folder
from refold.errors import RefoldError, SaveError, WrongInput
from refold.executors import executor_named
from refold.executors.catalogue import why_unavailable
from refold.extension.pipeline_files import pipeline_to_text
from refold.optimization.job_stages import optimize
from refold.optimization.memory import as_bytes
from refold.optimization.optimized_module import OptimizedModule
from refold.optimization.progress import Progress
from refold.report.data import RewriteCard
from refold.report.document import Report
from refold.rewrite.transformation import Transformation

REPORT, REPORT_DATA, PIPELINE = "report.html", "report.json", "pipeline.yaml"


def optimize_model(console: Console, request: Request, options: OptimizeOptions) -> ExitCode:
    """Optimize a model and write the folder. Whatever can be refused is refused before the work begins."""
    check_place(options.out, options.overwrite, (REPORT, REPORT_DATA, PIPELINE))
    steps = chosen_pipeline(options.level, options.pipeline, device=request.device, effort=options.effort)
    texts = {PIPELINE: pipeline_to_text(steps)}
    _check_backend(options.backend, chosen_device(request.device))
    _check_memory(options.max_memory)
    start = time.monotonic()
    with progress(console) as show:
        show(f"loading {request.model}", 0.0)
        loaded = prepare(request)
        original = fingerprints(loaded.model)
        fast = _optimized(loaded, steps, options, show)
    report = fast.report
    if fast.graph_module is None:
        reason = " ".join(report.notes)
        _show_unsaved(console, report, reason, f"{reason} There is no graph to save, so nothing was written.")
        return ExitCode.NOT_CAPTURED
    about = About(loaded.source, loaded.dtype, original=original, run=_run(loaded, fast, options))
    texts |= {REPORT: report.to_html(), REPORT_DATA: report.to_json()}
    try:
        write_folder(options.out, fast.graph_module, about, loaded.inputs, texts=texts, overwrite=options.overwrite)
    except SaveError as error:
        _show_unsaved(console, report, str(error), f"The result could not be saved: {error}")
        return ExitCode.FAILED
    seconds, page = time.monotonic() - start, options.out / REPORT
    data = {"folder": str(options.out), "page": str(page), "seconds": round(seconds, 1), "subject": loaded.describe()}
    where = f"saved in {options.out} after {seconds:.0f} s; the report is {page.absolute()}"
    console.show(data | _plain(report), str(report), "", where)
    return ExitCode.DONE


def _show_unsaved(console: Console, report: Report, reason: str, sentence: str) -> None:
    """The work was long: what it found is shown although nothing could be saved."""
    console.show(_plain(report) | {"error": reason}, str(report))
    console.log(f"refold: {sentence}")


def _check_backend(name: str, device: torch.device) -> None:
    if name == "auto":
        return
    reason = why_unavailable(executor_named(name), device)
    if reason is not None:
        raise WrongInput(f"--backend {name} cannot be used here: {reason}.")


def _check_memory(given: str | None) -> None:
    try:
        as_bytes(given)
    except RefoldError as error:
        raise WrongInput(f"--max-memory {given} is no size: {error}") from None


def _optimized(
    loaded: LoadedModel, steps: tuple[Transformation, ...], options: OptimizeOptions, show: Progress
) -> OptimizedModule:
    return optimize(
        loaded.model,
        loaded.inputs,
        level=options.level,
        pipeline=steps,
        backend=options.backend,
        effort=options.effort,
        time_budget=options.time_budget,
        max_memory=options.max_memory,
        progress=show,
    )


def _run(loaded: LoadedModel, fast: OptimizedModule, options: OptimizeOptions) -> dict[str, Any]:
    """How the folder came about, to be read later."""
    settings = {"level": options.level, "backend": options.backend, "executor": fast.prepared.at_example.executor}
    return loaded.describe() | settings | {"report": REPORT, "created": fast.report.created}


def _plain(report: Report) -> dict[str, Any]:
    """The report without its graphs; report.json in the folder has all of it."""
    ratio = report.speedup
    return {
        "speedup": None if ratio is None else {"median": ratio.median, "low": ratio.low, "high": ratio.high},
        "exactness": None if report.exactness is None else {"grade": report.exactness.grade, "ok": report.exactness.ok},
        "nodes": {"before": len(report.graph_before), "after": len(report.graph_after)},
        "steps": [_plain_step(step) for step in report.steps],
        "timings": [{"name": t.name, "median_s": t.median, "low_s": t.low, "high_s": t.high} for t in report.timings],
        "executors": [
            {"name": e.name, "choice": e.choice, "why": e.why, "holds": e.resident, "needs": e.peak}
            for e in report.executors
        ],
        "left_out": [{"unit": w.unit, "before": w.before, "after": w.after} for w in report.left_out],
        "headroom": None if report.headroom is None else report.headroom.sentence,
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
