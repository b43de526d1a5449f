"""`refold bench`: everything that is installed here and can run a model, in turn, in one table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Column

from refold.command_line.console import Console, grouped, number, progress, table
from refold.command_line.loaded_model import LoadedModel, chosen_pipeline, prepare
from refold.command_line.options import Request
from refold.executors import executors, unavailable
from refold.measurement.timing import Comparison, Timing, measure_many
from refold.optimization.budget import Budget
from refold.optimization.job_stages import optimize
from refold.optimization.progress import Progress
from refold.report.text import duration
from refold.rewrite.transformation import Transformation
from refold.verification.accuracy import OutputReference
from refold.wording import first_line

EAGER = "eager"
REFOLD = "refold"
_MEASURE_SECONDS = 30.0


def bench_model(
    console: Console, request: Request, level: str, pipeline: Path | None, time_budget: float | None
) -> None:
    """Prepare every candidate, check its outputs, and time all of them in turn."""
    steps = chosen_pipeline(level, pipeline, device=request.device)
    with progress(console) as show:
        show(f"loading {request.model}", 0.0)
        loaded = prepare(request)
        race = Race(loaded, Budget(time_budget), show)
        race.add_executors()
        race.add_refold(steps, level)
        show("timing in turn", 0.9)
        comparison = race.run()
    data = {"subject": loaded.describe(), **comparison.to_dict(), "grades": race.grades, "left_out": race.left_out}
    rows = [_row(comparison, timing, race) for timing in comparison.ranked]
    left_out = grouped((race.left_out | comparison.failed).items(), most_names=99)
    lines = [f"not in the race: {names} ({why})" for _, why, names in left_out]
    numbers = map(number, ("speed-up", "median", "quartiles", "first call"))
    columns: list[str | Column] = [Column("candidate", no_wrap=True), *numbers, "exactness"]
    console.show(data, table(_title(loaded), columns, rows), *lines)


class Race:
    """The candidates, as they come in."""

    def __init__(self, loaded: LoadedModel, budget: Budget, show: Progress) -> None:
        self.loaded, self.budget, self.show = loaded, budget, show
        self.candidates: dict[str, Callable[..., Any]] = {EAGER: loaded.model}
        self.left_out = dict(unavailable(loaded.device))
        self.grades: dict[str, str] = {EAGER: "the reference"}
        self.label = REFOLD
        self.reference = OutputReference.of(loaded.model, loaded.inputs)

    def add_executors(self) -> None:
        """The model as it is, by every executor but the one that runs it eagerly."""
        inputs = self.loaded.inputs
        found = {name: e for name, e in executors(self.loaded.device).items() if name != "plain"}
        for i, (name, executor) in enumerate(found.items()):
            self.show(f"preparing {name}", 0.05 + 0.4 * i / len(found))
            if self.budget.seconds is not None and self.budget.spent > self.budget.seconds / 2:
                self.left_out[name] = "half of the time budget was spent"
                continue
            self.add(name, partial(executor.prepare, self.loaded.model, inputs.args, inputs.kwargs))

    def add_refold(self, steps: tuple[Transformation, ...], level: str) -> None:
        """What refold makes of the model."""

        def make() -> Callable[..., Any]:
            left = max(1.0, self.budget.left)
            fast = optimize(
                self.loaded.model,
                self.loaded.inputs,
                level=level,
                pipeline=steps,
                time_budget=left,
                cache=False,  # what is measured is this machine as it is now
                progress=lambda what, done: self.show(f"refold: {what}", 0.45 + 0.45 * done),
            )
            self.label = f"{REFOLD} ({fast.prepared.at_example.executor})"
            return fast

        self.add(REFOLD, make)

    def add(self, name: str, make: Callable[[], Callable[..., Any]]) -> None:
        """Make a candidate and see what it computes; whatever it raises, the others go on."""
        try:
            candidate = make()
            with torch.no_grad():
                self.grades[name] = self.reference.grade(self.loaded.inputs.given_to(candidate)).grade
        except Exception as error:
            self.left_out[name] = first_line(error)
            return
        self.candidates[name] = candidate

    def run(self) -> Comparison:
        """Time all of them in turn."""
        seconds = max(2.0, min(_MEASURE_SECONDS, self.budget.left))
        return measure_many(
            self.candidates, self.loaded.inputs, time_budget=seconds, baseline=EAGER, keep=[EAGER, REFOLD]
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


def _title(loaded: LoadedModel) -> str:
    about = loaded.describe()
    shapes = ", ".join(f"{name} {shape}" for name, shape in about["inputs"].items())
    return f"{about['class']} on {about['device']}, {about['dtype']}, {about['threads']} threads; {shapes}"
