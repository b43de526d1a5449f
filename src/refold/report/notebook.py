"""The report as a small table for a notebook, in which every text of the model is escaped."""

from __future__ import annotations

from html import escape

from refold.report.data import Report, RewriteCard
from refold.report.text import changed_sentence, exactness_sentence, model_sentence, speed_sentence

COLUMNS = ("rewrite", "status", "sites", "refused", "speed", "exactness")


def table(report: Report) -> str:
    facts = (
        ("speed", speed_sentence(report.speedup)),
        ("exactness", exactness_sentence(report.exactness)),
        ("changed", changed_sentence(report)),
        ("model", model_sentence(report)),
    )
    head = "".join(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in facts)
    title = f"<strong>{escape(report.title)}</strong>"
    return f"<div>{title}<table>{head}</table>{steps_table(report.steps)}</div>"


def steps_table(steps: tuple[RewriteCard, ...]) -> str:
    if not steps:
        return ""
    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells(step))}</tr>" for step in steps)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def cells(step: RewriteCard) -> tuple[str, ...]:
    speed = "" if step.gain is None else speed_sentence(step.gain)
    grade = "" if step.verification is None else step.verification.grade
    return (step.name, step.status, str(len(step.sites)), str(len(step.refusals)), speed, grade)
