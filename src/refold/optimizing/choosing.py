"""The fastest correct way to run a module here: every executor prepared, its outputs checked, all timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from refold.errors import RefoldError
from refold.executors import Executor, executor_named, executors, unavailable
from refold.measure import Comparison, measure_many
from refold.optimizing.budget import Budget
from refold.optimizing.calls import Inputs, split
from refold.verify import OutputReference

ORIGINAL = "original"
_MEASURE_SECONDS = 10.0


@dataclass
class Choice:
    """Which executor was chosen, how all of them did, and why others were left out."""

    name: str
    run: Callable[..., Any]
    follows_weights: bool
    comparison: Comparison | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    grades: dict[str, str] = field(default_factory=dict)


def choose(
    original: nn.Module,
    module: nn.Module,
    inputs: Inputs,
    *,
    backend: str,
    device: torch.device,
    reference: OutputReference,
    level: str,
    budget: Budget,
    tell: Callable[[str, float], None],
) -> Choice:
    """Prepare, check and time the executors; the fastest correct one wins."""
    wanted = executors(device) if backend == "auto" else {backend: _available(backend, device)}
    left_out = unavailable(device) if backend == "auto" else {}
    ready, grades = _prepare(wanted, module, inputs, reference, level, budget, tell, left_out)
    if not ready and backend != "auto":
        raise RefoldError(f"the executor {backend} cannot run this model: {left_out[backend]}")
    tell("timing the executors", 0.9)
    contenders: dict[str, Callable[..., Any]] = {ORIGINAL: original, **ready}
    seconds = max(1.0, budget.share(0.5, _MEASURE_SECONDS))
    comparison = measure_many(contenders, inputs, time_budget=seconds, baseline=ORIGINAL, keep=[ORIGINAL])
    left_out |= comparison.failed
    name = comparison.best if backend == "auto" else backend
    follows = name == ORIGINAL or wanted[name].follows_weights
    return Choice(name, contenders[name], follows, comparison, left_out, grades)


def _why_not_now(name: str, level: str, budget: Budget) -> str | None:
    """Why there is no time for an executor. Autotuning takes minutes, and gains little once graphs are replayed."""
    if budget.left <= 0:
        return "the time budget was spent"
    if "autotune" in name and level != "max":
        return "autotuning takes minutes; level='max' tries it"
    return None


def _available(name: str, device: torch.device) -> Executor:
    executor = executor_named(name)
    reason = executor.available(device)
    if reason is not None:
        raise RefoldError(f"the executor {name} cannot be used here: {reason}.")
    return executor


def _prepare(
    wanted: Mapping[str, Executor],
    module: nn.Module,
    inputs: Inputs,
    reference: OutputReference,
    level: str,
    budget: Budget,
    tell: Callable[[str, float], None],
    left_out: dict[str, str],
) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    args, kwargs = split(inputs)
    ready: dict[str, Callable[..., Any]] = {}
    grades: dict[str, str] = {}
    for i, (name, executor) in enumerate(wanted.items()):
        tell(f"preparing {name}", 0.9 * i / len(wanted))
        reason = _why_not_now(name, level, budget)
        if ready and reason is not None:
            left_out[name] = reason
            continue
        try:
            run = executor.prepare(module, args, kwargs)
            with torch.no_grad():
                grade = reference.grade(run(*args, **kwargs))
        except Exception as error:  # whatever an engine raises, it is not the way to run this model
            left_out[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
            continue
        grades[name] = grade.grade
        if not grade.acceptable or (level == "safe" and grade.grade != "bit-identical"):
            left_out[name] = f"its outputs are {grade.grade}"
            continue
        ready[name] = run
    return ready, grades
