"""The main job: capture a model, rewrite it, verify, measure, keep what helps, and choose the fastest way to run it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold.capture import trace
from refold.capturing.errors import CaptureError
from refold.capturing.fresh import fresh_call
from refold.capturing.module import has_fixed_values, other_fixed_values
from refold.capturing.restoring import untouched
from refold.capturing.state import State
from refold.change import Change
from refold.errors import RefoldError
from refold.executors import Executor, Signature, UnsupportedInput, executor_named
from refold.explaining import hollow_copy
from refold.history import history
from refold.optimizing.accurate import grade_outputs, take_back_inaccurate
from refold.optimizing.all_ones import AllOnes, without_masks_of_ones
from refold.optimizing.budget import Budget
from refold.optimizing.calls import Inputs, as_call, device_of_call, split
from refold.optimizing.chance import why_not_comparable
from refold.optimizing.choosing import ORIGINAL, Choice, available_executor, choose
from refold.optimizing.freshness import Freshness, read_in_eval
from refold.optimizing.optimized import OptimizedModule
from refold.optimizing.pipeline import chosen_pipeline
from refold.optimizing.progress import Progress, shown, silent
from refold.optimizing.reporting import build_report
from refold.optimizing.sameness import Sameness
from refold.optimizing.steps import Step, take_back, take_steps
from refold.optimizing.variant import Variant
from refold.report.data import GraphData, ModelSummary, Report
from refold.report.graph import graph_data
from refold.transformation import Transformation
from refold.transformations.simplify_attention_mask import SimplifyAttentionMask
from refold.verify import Graded, OutputReference, Verification


def optimize(
    model: nn.Module,
    example_inputs: Any,
    *,
    level: str = "default",
    pipeline: Sequence[Transformation] | Transformation | None = None,
    backend: str = "auto",
    time_budget: float | None = None,
    on_new_input: str = "fallback",
    progress: bool | Progress | None = None,
) -> OptimizedModule:
    """Find the fastest correct way to run a model on inputs like these, on this machine.

    The model is captured, every transformation of the pipeline is applied, verified against a float64 reference and
    measured against the version before it, and taken back if it is wrong or slower. Then every executor that is
    available (`backend="auto"`), or the one that is named, is prepared, checked and timed, and the fastest one wins.

    `example_inputs` is a dict of keyword arguments, a tuple of positional ones, or one tensor. `level="safe"` keeps
    only rewrites that leave every output bit-identical. `time_budget` (seconds) bounds the search: what was not tried
    by then is not tried. `on_new_input="optimize"` optimizes again for every new input signature instead of running
    the original on it. The result is called like the model; `.restore()` gives the model back.
    """
    if on_new_input not in ("fallback", "optimize"):
        raise RefoldError(f"on_new_input must be 'fallback' or 'optimize', not {on_new_input!r}.")
    if time_budget is not None and not time_budget > 0:
        raise RefoldError(f"time_budget must be a positive number of seconds, or None, not {time_budget!r}.")
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise RefoldError(f"a torch.nn.Module is needed, and {what} was given.")
    if isinstance(model, torch.jit.ScriptModule):
        raise RefoldError("a TorchScript module holds no Python to capture; give the model that it was made from.")
    if isinstance(model, OptimizedModule):
        raise RefoldError("the model is optimized already; call .restore() on it first.")
    if model.training:
        raise RefoldError("the model is in training mode; call model.eval() first: optimizing is for inference.")
    steps = chosen_pipeline(level, pipeline)

    def build(inputs: Inputs, tell: Progress) -> Variant:
        with torch.inference_mode(False):  # weights that are merged there could not be trained any more
            own = fresh_call(*split(inputs))
            state = State(model, parameters=False)  # merged ones lie elsewhere afterwards
            try:
                budget = Budget(time_budget)
                variant = _build(model, own[1] or own[0], steps, level=level, backend=backend, budget=budget, tell=tell)
                written = state.changes()
            finally:
                state.put_back()
            variant.sameness = None if variant.executor == ORIGINAL else Sameness(model, written)
            return variant

    def again(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        if args and kwargs:
            raise RefoldError("a call that mixes positional and keyword arguments cannot be optimized again.")
        return build(kwargs or args, silent)

    with shown(progress) as tell:
        variant = build(as_call(example_inputs), tell)
    return OptimizedModule(model, variant, again if on_new_input == "optimize" else None)


def _build(
    model: nn.Module,
    inputs: Inputs,
    pipeline: tuple[Transformation, ...],
    *,
    level: str,
    backend: str,
    budget: Budget,
    tell: Progress,
) -> Variant:
    """Everything for one input signature."""
    args, kwargs = split(inputs)
    notes: list[str] = []
    device = device_of_call(model, inputs)
    if backend != "auto":
        available_executor(backend, device)  # asked before the long work
    tell("capturing", 0.0)
    with untouched(model):
        reason = why_not_comparable(model, inputs)
    if reason:
        return _as_it_is(model, inputs, backend, reason)
    gm = _captured(model, args, kwargs, notes)
    budget.traced()
    before = GraphData() if gm is None else graph_data(gm)
    original = None if gm is None else hollow_copy(gm)
    steps = (
        [] if gm is None else take_steps(gm, pipeline, inputs, level=level, budget=budget, tell=_part(tell, 0.1, 0.5))
    )
    tell("running the float64 reference", 0.5)
    reference = OutputReference.of(model if original is None else original, inputs)
    if gm is not None:
        steps, graded = take_back_inaccurate(gm, steps, inputs, reference, level=level, budget=budget)
    choice = choose(
        model,
        model if gm is None else gm,
        inputs,
        untouched=original if any(step.status == "kept" for step in steps) else None,
        backend=backend,
        device=device,
        reference=reference,
        level=level,
        budget=budget,
        tell=_part(tell, 0.55, 1.0),
        as_called=functools.partial(_as_called, gm, Signature.of(args, kwargs), read_in_eval(model), Sameness(model)),
    )
    notes += choice.notes
    if gm is not None and choice.rewrites_hinder:
        steps = take_back(gm, steps, f"{choice.name} runs the model as fast without the rewrites.")
        graded = grade_outputs(gm, inputs, reference)
        if choice.follows_weights:  # it reads them from where they lay, and merged ones have just moved
            choice.run = executor_named(choice.name).prepare(gm, args, kwargs)
    weights = [] if choice.name == ORIGINAL else read_in_eval(model)
    all_ones: AllOnes | str = ""
    if gm is not None and choice.name != ORIGINAL and _drops_masks(pipeline, level, device):
        tell("timing calls without a mask of ones", 1.0)
        all_ones = without_masks_of_ones(
            gm,
            choice.run,
            executor_named(choice.name),
            inputs,
            weights=weights,
            reference=reference,
            level=level,
            budget=budget,
        )
        notes += [str(all_ones)] if str(all_ones) else []
    exactness = None if gm is None else _exactness(steps, graded)
    changes = [] if gm is None else _changes_by_step(gm, steps)
    report = build_report(model, before, gm, steps, changes, choice, exactness, notes)
    freshness = Freshness(weights, gm, follows=choice.follows_weights)
    twin = all_ones if isinstance(all_ones, AllOnes) else None
    variant = Variant(Signature.of(args, kwargs), gm, choice.run, choice.name, freshness, report, twin)
    if gm is not None and choice.name != ORIGINAL and has_fixed_values(gm):
        variant.other_values = functools.partial(other_fixed_values, gm)
    return variant


def _as_called(
    gm: GraphModule | None,
    signature: Signature,
    weights: list[torch.Tensor],
    sameness: Sameness,
    executor: Executor,
    run: Callable[..., Any],
) -> Callable[..., Any]:
    """A way to run a model, with the looks at its arguments and at the model that a call of the optimized one takes."""
    freshness = Freshness(weights, gm, follows=executor.follows_weights)
    nothing = Report("", ModelSummary(""))
    variant = Variant(signature, gm, run, executor.name, freshness, nothing, sameness=sameness)

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return variant.run_checked(signature.tensors(args, kwargs), args, kwargs)
        except UnsupportedInput:  # other contenders write into the model: what is timed is the looking all the same
            return run(*args, **kwargs)

    return call


def _as_it_is(model: nn.Module, inputs: Inputs, backend: str, why: str) -> Variant:
    """The model itself, where nothing can be compared with it."""
    if backend != "auto":
        raise RefoldError(f"the executor {backend} cannot be used for this model: {why}.")
    note = f"The model is run as it is: {why}."
    report = build_report(model, GraphData(), None, [], [], Choice(ORIGINAL, model, True), None, [note])
    freshness = Freshness([], None, follows=True)
    return Variant(Signature.of(*split(inputs)), None, model, ORIGINAL, freshness, report)


def _drops_masks(pipeline: tuple[Transformation, ...], level: str, device: torch.device) -> bool:
    """Whether masks are to be dropped, and where that pays: the attention kernels of CPUs do not mind a mask."""
    wanted = any(isinstance(step, SimplifyAttentionMask) for step in pipeline)
    return wanted and (device.type == "cuda" or level == "max")


def _captured(model: nn.Module, args: Any, kwargs: Any, notes: list[str]) -> GraphModule | None:
    """The model as a graph for just these sizes; None, with a note, where it cannot be captured."""
    if isinstance(model, GraphModule):
        return hollow_copy(model)  # the given one stays as it is: it is what runs on other inputs
    try:
        with torch.no_grad():
            return trace(model, *args, dynamic=False, whole_result=True, **kwargs)
    except CaptureError as error:
        notes.append(f"The model could not be captured, so it is run as it is: {error}{_without_cache(model, kwargs)}")
        return None


def _without_cache(model: nn.Module, given: dict[str, Any]) -> str:
    """What to try with a model whose result holds a cache."""
    if "use_cache" in given or "use_cache" not in inspect.signature(model.forward).parameters:
        return ""
    return " If its cache is in the way and not needed: give use_cache=False, in the example and in every call."


def _exactness(steps: list[Step], graded: Graded) -> Verification:
    """What the kept steps found at their sites, and how the outputs of the whole rewritten graph are graded."""
    kept = [step.verification for step in steps if step.status == "kept" and step.verification is not None]
    return functools.reduce(Verification.joined, kept, Verification(outputs=graded.outputs))


def _part(tell: Callable[[str, float], None], start: float, stop: float) -> Progress:
    return lambda what, done: tell(what, start + done * (stop - start))


def _changes_by_step(gm: GraphModule, steps: list[Step]) -> list[tuple[int, Change]]:
    """The changes on the module's history, each with the number of the step that made it."""
    by_signature = {step.transformation.signature: i for i, step in enumerate(steps) if step.status == "kept"}
    return [(by_signature.get(change.signature, 0), change) for change in history(gm)]
