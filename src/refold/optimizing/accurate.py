"""Steps that are right at every site, and yet make a model worse: the errors of its outputs are beyond what rounding
makes of the original. Kernels differ (a group norm of channels-last images sums in another way), and errors add up."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import GraphModule

from refold.history import undo
from refold.optimizing.budget import Budget
from refold.optimizing.calls import Inputs, split
from refold.optimizing.steps import Step, take
from refold.verify import Graded, OutputReference


def take_back_inaccurate(
    gm: GraphModule, steps: list[Step], inputs: Inputs, reference: OutputReference, *, level: str, budget: Budget
) -> tuple[list[Step], Graded]:
    """Take steps back, the last ones first, until the outputs are no worse than the original's. Only the step that
    made the difference stays away: those behind it are tried again. Also how the outputs are graded in the end."""
    steps = list(steps)
    undone: list[int] = []
    graded = grade_outputs(gm, inputs, reference)
    for i in reversed([i for i, step in enumerate(steps) if step.status == "kept"]):
        if graded.acceptable:
            break
        worse, undone = graded, [i, *undone]
        undo(gm, steps[i].changes)
        graded = grade_outputs(gm, inputs, reference)
    if not undone:
        return steps, graded
    culprit, *others = undone
    steps[culprit] = _taken_back(steps[culprit], worse)
    for i in others:
        steps[i] = take(gm, steps[i].transformation, inputs, level=level, budget=budget)
        if steps[i].status != "kept":
            continue
        found = grade_outputs(gm, inputs, reference)
        if found.acceptable:
            graded = found
            continue
        undo(gm, steps[i].changes)
        steps[i] = _taken_back(steps[i], found)
    return steps, graded


def grade_outputs(gm: GraphModule, inputs: Inputs, reference: OutputReference) -> Graded:
    """How the outputs of a graph compare with the original's."""
    args, kwargs = split(inputs)
    with torch.no_grad():
        return reference.grade(gm(*args, **kwargs))


def _taken_back(step: Step, worse: Graded) -> Step:
    output = next(output for output in worse.outputs if output.grade == worse.grade)
    note = f"It is right at every site, but an output of the model is worse with it: {output}."
    return replace(step, status="taken back", note=note)
