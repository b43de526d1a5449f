"""An executor is used only where its meaning is torch's: operators are probed, inputs guarded, the whole tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from refold.errors import PreparationFailed
from refold.executors.exported_engine import EnginePlan, plan_for_engine
from refold.executors.guards import Guard, Guarded
from refold.executors.interface import Executor
from refold.executors.model_probe import why_other_meaning
from refold.executors.plain import Plain
from refold.executors.requirements import index_guard, inputs_of, weakest_guard
from refold.executors.semantics import answers_for
from refold.executors.value_ranges import ValueRanges
from refold.nested import tensors_in

Args = tuple[Any, ...]


def prepare_engine(
    engine: Executor, plan: EnginePlan, module: nn.Module, build: Callable[[EnginePlan, nn.Module], Callable[..., Any]]
) -> Callable[..., Any]:
    """Prepare an engine with operators of its own, probed one by one, then as a whole; `build` prepares a plan."""

    def build_operators(operators: nn.Module, operands: Args) -> Callable[..., Any]:
        own = plan_for_engine(operators, operands, {}, engine.name)
        return build(replace(own, is_checked=False), operators)

    inputs = inputs_of(plan.exported, plan.tensors)
    ranges = ValueRanges(plan.exported, {})
    answers = answers_for(engine.key, build_operators, plan.exported, ranges)
    guard = weakest_guard(plan.exported, inputs, answers)
    return _as_torch(plan, module, guard, build(plan, module))


def prepare_as_torch(executor: Executor, module: nn.Module, args: Args, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Prepare any executor; one that does not see to it by itself that it means what torch means is probed."""
    if executor.keeps_meaning:
        return executor.prepare(module, args, kwargs)

    def build(plan: EnginePlan, part: nn.Module) -> Callable[..., Any]:
        return executor.prepare(part, *plan.arguments)

    plan = plan_for_engine(module, args, kwargs, executor.name)
    return prepare_engine(executor, plan, module, build)


def prepare_compiled(
    executor: Executor, module: nn.Module, args: Args, kwargs: dict[str, Any], run: Callable[..., Any]
) -> Callable[..., Any]:
    """What torch compiled keeps torch's meaning but for indices, which it wraps: they are guarded, and the whole tried.

    On a GPU nothing is: an index out of range stops the device there, compiled or not."""
    if any(tensor.device.type != "cpu" for tensor in tensors_in((args, kwargs))):
        return run
    try:
        plan = plan_for_engine(module, args, kwargs, executor.name)
    except PreparationFailed:  # what cannot be exported may be compiled in parts; the trial has to do
        return run
    return _as_torch(plan, module, index_guard(plan.exported, inputs_of(plan.exported, plan.tensors)), run)


def _as_torch(plan: EnginePlan, module: nn.Module, guard: Guard, run: Callable[..., Any]) -> Callable[..., Any]:
    plain = Plain().prepare(module, *plan.arguments)
    reason = why_other_meaning(plan, guard, run, plain)
    if reason is not None:
        raise PreparationFailed(reason)
    return Guarded(guard, plan.spec, run, plain) if guard else run
