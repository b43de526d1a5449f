"""The report as a small table for a notebook, in which every text of the model is escaped."""

from __future__ import annotations

from html import escape

from refold.report.data import ReportData, RewriteCard
from refold.report.text import found_something, headline, speed_sentence
from refold.report.timing_plot import timing_plot

COLUMNS = ("rewrite", "status", "sites", "refused", "speed", "exactness")


def table(report: ReportData) -> str:
    head = "".join(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in headline(report))
    title = f"<strong>{escape(report.title)}</strong>"
    plot = timing_plot(report.timings)
    return f"<div>{title}<table>{head}</table>{plot}{steps_table(report.steps)}</div>"


def steps_table(steps: tuple[RewriteCard, ...]) -> str:
    if not steps:
        return ""
    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    found = [cells(step) for step in steps if found_something(step)]
    others = [step.name for step in steps if not found_something(step)]
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in found)
    if others:
        names = f'<td colspan="{len(COLUMNS) - 1}">{escape(", ".join(others))}</td>'
        rows += f"<tr><td>no match, or not tried</td>{names}</tr>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def cells(step: RewriteCard) -> tuple[str, ...]:
    speed = "" if step.gain is None else speed_sentence(step.gain)
    grade = "" if step.verification is None else step.verification.grade
    return (step.name, step.status, str(len(step.sites)), str(len(step.refusals)), speed, grade)
