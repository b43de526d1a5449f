"""An executor is used only where its meaning is torch's: operators are probed, inputs guarded, the whole tried."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from refold.errors import PreparationFailed
from refold.executors.exported_engine import EnginePlan, plan_for_engine
from refold.executors.guards import Guard, Guarded
from refold.executors.input_spec import InputSpec
from refold.executors.interface import Executor
from refold.executors.interruptible import interruptibly
from refold.executors.model_probe import why_other_meaning
from refold.executors.open_axes import OpenAxes
from refold.executors.plain import Plain
from refold.executors.requirements import Input, index_guard, inputs_of, weakest_guard, why_not_at
from refold.executors.semantics import Answer, answers_for
from refold.executors.sized_program import at_sizes
from refold.executors.value_ranges import Range, ValueRanges
from refold.nested import tensors_in

Args = tuple[Any, ...]


def prepare_engine(
    engine: Executor, plan: EnginePlan, module: nn.Module, build: Callable[[EnginePlan, nn.Module], Callable[..., Any]]
) -> Callable[..., Any]:
    """Prepare an engine with operators of its own, probed one by one, then as a whole; `build` prepares a plan."""

    def build_operators(operators: nn.Module, operands: Args) -> Callable[..., Any]:
        own = plan_for_engine(operators, operands, {}, engine.name)
        return build(replace(own, is_checked=False), operators)

    shapes = [tensor.shape for tensor in plan.tensors]
    program = plan.exported if plan.axes is None else at_sizes(plan.exported, shapes)
    inputs = inputs_of(program, plan.tensors)
    held: dict[str, Range] = {}
    answers = answers_for(engine.key, build_operators, program, ValueRanges(program, {}, held))
    guard = weakest_guard(program, inputs, answers, held)
    if plan.axes is not None:
        by_name = {node.name: answer for node, answer in answers.items()}
        plan = replace(plan, axes=_where_it_holds(plan, plan.axes, guard, inputs, by_name, held))
    return _as_torch(plan, module, guard, build(plan, module))


def _where_it_holds(
    plan: EnginePlan,
    axes: OpenAxes,
    guard: Guard,
    inputs: list[Input],
    answers: dict[str, Answer],
    held: dict[str, Range],
) -> OpenAxes:
    """The sizes at which a guard does: found at the smallest and the largest, since what it bounds grows with sizes."""

    def why_not(sizes: Sequence[int]) -> str | None:
        try:
            program = at_sizes(plan.exported, axes.shapes(plan.tensors, sizes))
        except PreparationFailed as failure:
            return str(failure)
        return why_not_at(program, guard, inputs, answers, held)

    example = axes.sizes_of(plan.tensors)
    most = [_largest(axis.high, i, example, why_not) for i, axis in enumerate(axes.axes)]
    reason = why_not(axes.least) or why_not(most)
    if reason is not None:
        raise PreparationFailed(f"At other sizes: {reason}")
    return axes.up_to(most)


def _largest(high: int, axis: int, example: list[int], why_not: Callable[[Sequence[int]], str | None]) -> int:
    """The largest size of an axis, all others as in the example; where something is indexed by it (a table of
    positions), the largest of those twice, four times … as large as in the example."""

    def is_too_large(size: int) -> bool:
        return size > high or why_not([*example[:axis], size, *example[axis + 1 :]]) is not None

    if not is_too_large(high):
        return high
    size = example[axis]
    return size << bisect.bisect_left(range(1, high.bit_length()), True, key=lambda k: is_too_large(size << k))


def prepare_as_torch(executor: Executor, module: nn.Module, args: Args, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Prepare any executor; one that does not see to it by itself that it means what torch means is probed."""
    if executor.keeps_meaning:
        return _prepare(executor, module, args, kwargs)

    def build(plan: EnginePlan, part: nn.Module) -> Callable[..., Any]:
        return _prepare(executor, part, *plan.arguments)

    axes = OpenAxes.of(module, args, kwargs).from_size(1) if executor.takes_any_size else None
    plan = plan_for_engine(module, args, kwargs, executor.name, axes=axes)
    return prepare_engine(executor, plan, module, build)


def _prepare(executor: Executor, module: nn.Module, args: Args, kwargs: dict[str, Any]) -> Callable[..., Any]:
    if executor.hears_interrupts:
        return executor.prepare(module, args, kwargs)
    return interruptibly(lambda: executor.prepare(module, args, kwargs))


def prepare_compiled(
    executor: Executor,
    module: nn.Module,
    args: Args,
    kwargs: dict[str, Any],
    run: Callable[..., Any],
    axes: OpenAxes | None = None,
) -> Callable[..., Any]:
    """What torch compiled keeps torch's meaning but for indices, which it wraps: they are guarded, and the whole tried.
    With `axes`, what lies outside of these sizes is run by the module.

    On a GPU nothing is: an index out of range stops the device there, compiled or not."""
    if any(tensor.device.type != "cpu" for tensor in tensors_in((args, kwargs))):
        return run if axes is None else _within(axes, module, args, kwargs, run)
    try:
        plan = plan_for_engine(module, args, kwargs, executor.name)
    except PreparationFailed:  # what cannot be exported may be compiled in parts; the trial has to do
        return run if axes is None else _within(axes, module, args, kwargs, run)
    guard = index_guard(plan.exported, inputs_of(plan.exported, plan.tensors))
    return _as_torch(replace(plan, axes=axes), module, guard, run)


def _within(
    axes: OpenAxes, module: nn.Module, args: Args, kwargs: dict[str, Any], run: Callable[..., Any]
) -> Callable[..., Any]:
    """What was prepared for sizes within bounds, and the module for others."""
    return Guarded((), InputSpec.of(args, kwargs, open_sizes=True), run, Plain().prepare(module, args, kwargs), axes)


def _as_torch(plan: EnginePlan, module: nn.Module, guard: Guard, run: Callable[..., Any]) -> Callable[..., Any]:
    plain = Plain().prepare(module, *plan.arguments)
    for each in _at_all_ends(plan):
        reason = why_other_meaning(each, guard, run, plain)
        if reason is not None:
            raise PreparationFailed(reason)
    spec = replace(plan.spec, open_sizes=plan.axes is not None)
    return Guarded(guard, spec, run, plain, plan.axes) if guard or plan.axes else run


def _at_all_ends(plan: EnginePlan) -> Iterator[EnginePlan]:
    """The plan at the example's sizes; where sizes are open, at the smallest ones too, one after the other."""
    yield plan
    if plan.axes is None:
        return
    sizes = plan.axes.sizes_of(plan.tensors)
    for i, low in enumerate(plan.axes.least):
        small = [low if j == i else size for j, size in enumerate(sizes)]
        if small != sizes:
            yield replace(plan, tensors=plan.axes.resized(plan.tensors, small))
