"""`refold bench`: everything that is installed here and can run a model, in turn, in one table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from refold.command_line.choosing import chosen
from refold.command_line.progress import told
from refold.command_line.screen import Screen
from refold.command_line.subject import Subject, Wanted, prepare
from refold.command_line.tables import Column, grouped, table
from refold.executors import executors, unavailable
from refold.measure import Comparison, Timing, measure_many
from refold.optimize import optimize
from refold.optimizing.budget import Budget
from refold.optimizing.calls import split
from refold.optimizing.progress import Progress
from refold.report.text import duration
from refold.transformation import Transformation
from refold.verify import OutputReference

EAGER = "eager"
REFOLD = "refold"
_MEASURE_SECONDS = 30.0
_COLUMNS: list[str | Column] = [
    Column("contender", whole=True),
    Column("speed-up", number=True),
    Column("median", number=True),
    Column("quartiles", number=True),
    Column("first call", number=True),
    "exactness",
]


def bench_model(screen: Screen, wanted: Wanted, level: str, pipeline: Path | None, time_budget: float | None) -> None:
    """Prepare every contender, check its outputs, and time all of them in turn."""
    steps = chosen(level, pipeline)
    with told(screen) as tell:
        tell(f"loading {wanted.model}", 0.0)
        subject = prepare(wanted)
        race = Race(subject, Budget(time_budget), tell)
        race.add_executors(0.05, 0.45)
        race.add_refold(steps, level, 0.45, 0.9)
        tell("timing in turn", 0.9)
        comparison = race.run()
    data = {"subject": subject.describe(), **comparison.to_dict(), "grades": race.grades, "left_out": race.left_out}
    rows = [_row(comparison, timing, race) for timing in comparison.ranked]
    left_out = grouped((race.left_out | comparison.failed).items(), most_names=99)
    lines = [f"not in the race: {names} ({why})" for _, why, names in left_out]
    screen.show(data, table(_title(subject), _COLUMNS, rows), *lines)


class Race:
    """The contenders, as they come in."""

    def __init__(self, subject: Subject, budget: Budget, tell: Progress) -> None:
        self.subject, self.budget, self.tell = subject, budget, tell
        self.contenders: dict[str, Callable[..., Any]] = {EAGER: subject.model}
        self.left_out = dict(unavailable(subject.device))
        self.grades: dict[str, str] = {EAGER: "the reference"}
        self.label = REFOLD
        self.reference = OutputReference.of(subject.model, subject.inputs)

    def add_executors(self, start: float, stop: float) -> None:
        """The model as it is, by every executor but the one that runs it eagerly."""
        args, kwargs = split(self.subject.inputs)
        found = {name: e for name, e in executors(self.subject.device).items() if name != "plain"}
        for i, (name, executor) in enumerate(found.items()):
            self.tell(f"preparing {name}", start + (stop - start) * i / len(found))
            if self.budget.seconds is not None and self.budget.spent > self.budget.seconds / 2:
                self.left_out[name] = "half of the time budget was spent"
                continue
            self.add(name, partial(executor.prepare, self.subject.model, args, kwargs))

    def add_refold(self, steps: tuple[Transformation, ...], level: str, start: float, stop: float) -> None:
        """What refold makes of the model."""

        def make() -> Callable[..., Any]:
            left = None if self.budget.seconds is None else max(1.0, self.budget.left)
            fast = optimize(
                self.subject.model,
                self.subject.inputs,
                level=level,
                pipeline=steps,
                time_budget=left,
                progress=lambda what, done: self.tell(f"refold: {what}", start + (stop - start) * done),
            )
            self.label = f"{REFOLD} ({fast.variants[0].executor})"
            return fast

        self.add(REFOLD, make)

    def add(self, name: str, make: Callable[[], Callable[..., Any]]) -> None:
        """Make a contender and see what it computes; whatever it raises, the others go on."""
        args, kwargs = split(self.subject.inputs)
        try:
            contender = make()
            with torch.no_grad():
                self.grades[name] = self.reference.grade(contender(*args, **kwargs)).grade
        except Exception as error:
            lines = str(error).strip().splitlines()
            self.left_out[name] = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
            return
        self.contenders[name] = contender

    def run(self) -> Comparison:
        """Time all of them in turn."""
        seconds = max(2.0, min(_MEASURE_SECONDS, self.budget.left))
        return measure_many(
            self.contenders, self.subject.inputs, time_budget=seconds, baseline=EAGER, keep=[EAGER, REFOLD]
        )


def _row(comparison: Comparison, timing: Timing, race: Race) -> tuple[object, ...]:
    low, high = timing.quartiles
    return (
        race.label if timing.name == REFOLD else timing.name,
        f"{comparison.speedup(timing.name):.2f}×",
        duration(timing.median),
        f"{duration(low)} – {duration(high)}",
        duration(timing.first_call),
        race.grades.get(timing.name, ""),
    )


def _title(subject: Subject) -> str:
    about = subject.describe()
    shapes = ", ".join(f"{name} {shape}" for name, shape in about["inputs"].items())
    return f"{about['class']} on {about['device']}, {about['dtype']}, {about['threads']} threads; {shapes}"
