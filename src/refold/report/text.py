"""The report as a few lines of plain text."""

from __future__ import annotations

from collections import Counter

from refold.report.data import GraphData, Ratio, Report, RewriteCard, TimingBar, Verification

NO_GAIN = "no measurable difference"


def summary(report: Report) -> str:
    """What a person wants to know first, then one line for each rewrite and each timing."""
    lines = [report.title, "=" * len(report.title), "", *headline(report)]
    if report.steps:
        lines += ["", "rewrites", *(step_line(step) for step in report.steps)]
    if report.timings:
        lines += ["", "timings", *timing_lines(report.timings)]
    if report.executors:
        lines += ["", "executors", *(f"  {row.choice:<9} {row.name}  {row.why}".rstrip() for row in report.executors)]
    return "\n".join([*lines, *(f"\nnote: {note}" for note in report.notes)])


def headline(report: Report) -> list[str]:
    return [
        f"  speed      {speed_sentence(report.speedup)}",
        f"  exactness  {exactness_sentence(report.exactness)}",
        f"  changed    {changed_sentence(report)}",
        f"  model      {model_sentence(report)}",
    ]


def speed_sentence(speedup: Ratio | None) -> str:
    if speedup is None:
        return "not measured"
    if speedup.low == speedup.high == 1:
        return "nothing that was tried is faster beyond the noise, so the original runs"
    spread = f"{speedup.median:.2f}×, between {speedup.low:.2f} and {speedup.high:.2f}"
    if speedup.low <= 1 <= speedup.high or round(speedup.median, 2) == 1:
        return f"{NO_GAIN} ({spread})"
    if speedup.median < 1:
        return f"slower ({spread})"
    return f"{speedup.median:.2f}× faster (between {speedup.low:.2f} and {speedup.high:.2f})"


def exactness_sentence(verification: Verification | None) -> str:
    if verification is None:
        return "not verified"
    return f"{verification.grade}: {verification.sentence}" if verification.sentence else verification.grade


def changed_sentence(report: Report) -> str:
    counts = Counter(step.status for step in report.steps)
    refusals = sum(len(step.refusals) for step in report.steps)
    places = f"{report.rewrites} place{'' if report.rewrites == 1 else 's'} by {counts['kept']} of {len(report.steps)}"
    parts = [f"{places} transformations"]
    if counts["taken back"]:
        parts.append(f"{counts['taken back']} taken back")
    if refusals:
        parts.append(f"{refusals} refusals, each with its reason")
    return ", ".join(parts)


def model_sentence(report: Report) -> str:
    parts = [report.model.class_name]
    if report.model.parameters is not None:
        parts.append(f"{report.model.parameters:,} parameters")
    if len(report.graph_before) or len(report.graph_after):
        parts.append(f"{nodes(report.graph_before)} → {nodes(report.graph_after)} nodes")
    return ", ".join(parts)


def nodes(graph: GraphData) -> str:
    return f"{len(graph):,}"


def step_line(step: RewriteCard) -> str:
    parts = [f"  {step.status:<10} {step.name}", f"{len(step.sites)} site{'' if len(step.sites) == 1 else 's'}"]
    if step.gain is not None:
        parts.append(speed_sentence(step.gain))
    if step.verification is not None:
        parts.append(step.verification.grade)
    if step.refusals:
        parts.append(f"{len(step.refusals)} refused")
    if step.note:
        parts.append(step.note)
    return " · ".join(parts)


def timing_lines(timings: tuple[TimingBar, ...]) -> list[str]:
    width = max(len(bar.name) for bar in timings)
    return [f"  {bar.name:<{width}}  {timing_text(bar)}  {bar.note}".rstrip() for bar in timings]


def timing_text(bar: TimingBar) -> str:
    return f"{duration(bar.median)}  ({duration(bar.low)} to {duration(bar.high)})"


def duration(seconds: float) -> str:
    """Three digits and a unit: 12.3 ms."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
