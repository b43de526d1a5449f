"""The report as a few lines of plain text."""

from __future__ import annotations

from collections import Counter

from refold.report.data import Calls, ExactnessSummary, ExecutorRow, LeftOut, Ratio, ReportData, RewriteCard, TimingBar
from refold.wording import byte_count, counted


def summary(report: ReportData) -> str:
    """What a person wants to know first, then one line for each rewrite and each timing."""
    lines = [report.title, "=" * len(report.title), "", *(f"  {name:<9}  {text}" for name, text in headline(report))]
    if report.steps:
        lines += ["", "rewrites", *step_lines(report.steps)]
    if report.timings:
        lines += ["", "timings", *timing_lines(report.timings)]
    if report.executors:
        lines += ["", "executors", *(f"  {line}" for line in executor_lines(report.executors))]
    return "\n".join([*lines, *(f"\nnote: {note}" for note in report.notes)])


def headline(report: ReportData) -> tuple[tuple[str, str], ...]:
    """The facts that come first, each with its name: where the speed comes from stands before how exact it is."""
    left_out = "; ".join(map(left_out_sentence, report.left_out))
    facts = (
        ("speed", speed_sentence(report.speedup)),
        ("left out", left_out),
        ("headroom", "" if report.headroom is None else report.headroom.sentence),
        ("exactness", exactness_sentence(report.exactness)),
        ("changed", changed_sentence(report)),
        ("calls", calls_sentence(report.calls)),
        ("model", model_sentence(report)),
    )
    return tuple((name, text) for name, text in facts if text)


def left_out_sentence(work: LeftOut) -> str:
    """How much of one kind of work is not done any more, and why that is exact."""
    less = f"{amount(work.before - work.after)} of {amount(work.before)} {work.unit} ({work.share:.0%})"
    return f"{less}, {work.why}" if work.why else less


def amount(number: float) -> str:
    """A count in full, or in three digits and a unit where it is long."""
    for unit, unit_size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if number >= unit_size:
            return f"{number / unit_size:.3g} {unit}"
    return f"{number:,.0f}"


def calls_sentence(calls: Calls | None) -> str:
    """How many calls ran the fast way, and why the others did not; nothing before the first one."""
    if calls is None or calls.fast + calls.original == 0:
        return ""
    if not calls.original:
        return f"all {calls.fast:,} ran the fast way"
    reasons = "; ".join(f"{count:,} because {reason}" for reason, count in calls.reasons)
    return f"{calls.fast:,} ran the fast way, {calls.original:,} the original: {reasons}"


def speed_sentence(speedup: Ratio | None) -> str:
    """Faster, slower or not decided: what the interval of the measurement says, and nothing else."""
    if speedup is None:
        return "not measured"
    if speedup.low == speedup.high == 1:
        return "nothing that was tried is faster beyond the noise, so the original runs"
    low, high, median = times(speedup.low), times(speedup.high), times(speedup.median)
    return {
        "faster": f"{median} faster (between {low} and {high})",
        "slower": f"slower: {median} (between {low} and {high})",
        "not decided": f"not decided: between {low} and {high}",
    }[speedup.verdict]


def times(ratio: float) -> str:
    """A ratio in two digits behind the point, or in as many as tell it from 1."""
    digits = next((n for n in (2, 3, 4) if round(ratio, n) != 1 or ratio == 1), 2)
    return f"{ratio:.{digits}f}×"


def exactness_sentence(verification: ExactnessSummary | None) -> str:
    if verification is None:
        return "not verified"
    return f"{verification.grade}: {verification.sentence}" if verification.sentence else verification.grade


def changed_sentence(report: ReportData) -> str:
    counts = Counter(step.status for step in report.steps)
    refusals = sum(len(step.refusals) for step in report.steps)
    parts = [f"{counted(report.rewrites, 'place')} by {counts['kept']} of {len(report.steps)} transformations"]
    if counts["taken back"]:
        parts.append(f"{counts['taken back']} taken back")
    if refusals:
        parts.append(f"{refusals} refusals, each with its reason")
    return ", ".join(parts)


def model_sentence(report: ReportData) -> str:
    parts = [report.model.class_name]
    if report.model.parameters is not None:
        parts.append(f"{report.model.parameters:,} parameters")
    if len(report.graph_before) or len(report.graph_after):
        parts.append(f"{len(report.graph_before):,} → {len(report.graph_after):,} nodes")
    return ", ".join(parts)


def step_lines(steps: tuple[RewriteCard, ...]) -> list[str]:
    """A line for each transformation that found something, and one for all others that have the same to say."""
    others: dict[tuple[str, str], list[str]] = {}
    for step in steps:
        if not found_something(step):
            others.setdefault((step.status, step.note), []).append(step.name)
    grouped = [
        f"  {status:<10} {', '.join(names)}{f' · {note}' if note else ''}" for (status, note), names in others.items()
    ]
    return [*map(step_line, filter(found_something, steps)), *grouped]


def found_something(step: RewriteCard) -> bool:
    """Whether a transformation saw a place that it is about."""
    return step.status in ("kept", "taken back") or bool(step.refusals)


def step_line(step: RewriteCard) -> str:
    parts = [f"  {step.status:<10} {step.name}", counted(len(step.sites), "site")]
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
    spans = [f"{duration(bar.median)}  ({duration(bar.low)} to {duration(bar.high)})" for bar in timings]
    return [f"  {bar.name:<{width}}  {span}  {bar.note}".rstrip() for bar, span in zip(timings, spans, strict=True)]


def executor_lines(rows: tuple[ExecutorRow, ...]) -> list[str]:
    """A line for each way that was timed, and one for each reason why others were not."""
    others: dict[str, list[str]] = {}
    for row in rows:
        if row.choice == "not tried":
            others.setdefault(row.why, []).append(row.name)
    timed = [executor_line(row) for row in rows if row.choice != "not tried"]
    return [*timed, *(f"not tried {', '.join(names)}: {why}" for why, names in others.items())]


def executor_line(row: ExecutorRow) -> str:
    """One way to run the model: whether it was chosen, how exact it is or why it was not tried, and what it holds."""
    held = () if row.resident is None else (f"holds {byte_count(row.resident)}",)
    peak = () if row.peak is None else (f"needs {byte_count(row.peak)} during a call",)
    return f"{row.choice:<9} {row.name}  {', '.join((*filter(None, (row.why,)), *held, *peak))}".rstrip()


def duration(seconds: float) -> str:
    """Three digits and a unit: 12.3 ms."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
