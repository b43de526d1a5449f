"""The main job: capture a model, rewrite it, verify, measure, keep what helps, and choose the fastest way to run it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold.call_arguments import CallArguments
from refold.capture.captured import why_refused
from refold.capture.exclusive import alone
from refold.capture.model_state import ModelState, all_or_nothing, untouched
from refold.capture.tracing import trace
from refold.errors import BadDecision, BadExample, CaptureError, RefoldError
from refold.executors import Executor, InputSpec, Plain, UnsupportedInput
from refold.optimization.cache_folder import cache_of_user
from refold.optimization.choice import ORIGINAL, ExecutorChoice, available_executor, choose
from refold.optimization.decision import Decision, digest_of_graph
from refold.optimization.determinism import why_not_comparable, why_stateful
from refold.optimization.fallbacks import Fallbacks
from refold.optimization.first_checks import check_model, first_call, takes
from refold.optimization.headroom import headroom
from refold.optimization.inventory import Inventory, names_of
from refold.optimization.job import Job
from refold.optimization.keeping import NOT_USED, Keeper, keeping
from refold.optimization.memory import as_bytes
from refold.optimization.optimized_module import OptimizedModule
from refold.optimization.place import Place
from refold.optimization.preparation import Preparation
from refold.optimization.prepared import Prepared, Way
from refold.optimization.progress import Progress, shown, silent
from refold.optimization.redoing import redo, to_race
from refold.optimization.report_building import build_report
from refold.optimization.settings import Settings
from refold.optimization.sizes import OtherSizes, draw_calls, has_open_sizes, size_notes
from refold.optimization.spelling import Spelling
from refold.optimization.steps import Rewritten, rewrite
from refold.optimization.variants import MOST_KINDS, sorted_by_kind
from refold.optimization.watch import Watch, read_in_eval
from refold.optimization.work_left_out import work_left_out
from refold.optimization.zeroed_outputs import hints_about_padding, zero_outputs
from refold.record.copies import shared_copy
from refold.record.reversal import undo_below
from refold.record.sharded_modules import check_whole
from refold.record.stack import history
from refold.report.data import GraphData, ModelSummary
from refold.report.document import Report
from refold.rewrite.transformation import Transformation
from refold.verification.accuracy import OutputReference


def optimize(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    level: str = "default",
    pipeline: Sequence[Transformation] | Transformation | None = None,
    backend: str = "auto",
    effort: str = "default",
    time_budget: float | None = None,
    sizes: str = "open",
    outputs: Sequence[str | int] | None = None,
    padding: str | None = None,
    on_fallback: str = "warn",
    max_memory: int | str | None = None,
    progress: bool | Progress | None = None,
    cache: bool = True,
) -> OptimizedModule:
    """Find the fastest correct way to run a model on inputs like these, on this machine.

    The model is captured, every transformation of the pipeline is applied, verified against a float64 reference and
    measured against the version before it, and reverted if it is wrong or slower. Then every executor that is
    available (`backend="auto"`), or the one that is named, is prepared, checked and timed, and the fastest one wins.

    `example_inputs` is a dict of keyword arguments, a tuple of positional ones, or one tensor; or a list of several
    such calls, of the sizes that matter. Calls of all other sizes that the model's code allows run fast as well, unless
    `sizes="example"`: then only the example's are prepared for. `level="safe"` keeps only rewrites that leave every
    output bit-identical. `effort="quick"` verifies the rewrites and tries what is ready at once; `"default"` tries the
    most promising ways to run the model within `time_budget` seconds (None: 30 on a CPU, 60 on a GPU, twice that for
    models of more than 500 million parameters); `"max"` tries all, and measures every rewrite alone. `progress` is
    called with what is being done and how much is done, from 0 to 1; True shows a bar, False nothing, and None a bar on
    a terminal. `outputs` names those that are wanted, by key or by position: the others come back as None, and what
    only they needed is not computed. `padding="zeros"` says that nobody reads outputs at padding: they are zeros there
    on every way, and padding is not computed where that pays. A call that nothing was prepared for runs the original,
    with a `FellBack` warning once for each reason; `on_fallback="ignore"` says nothing, `"raise"` refuses it.
    `max_memory` (bytes, or "2GB") bounds what a way to run the model may hold beside it and need during a call: those
    above it are not chosen. What was decided is kept in the user's cache folder, and holds for later processes after it
    was compared with the model; `cache=False` neither reads nor writes there. The result is called like the model;
    `.restore()` gives the model back.
    """
    settings = Settings(
        level=level,
        pipeline=pipeline,
        backend=backend,
        effort=effort,
        time_budget=time_budget,
        sizes=sizes,
        outputs=outputs,
        padding=padding,
        on_fallback=on_fallback,
        max_memory=max_memory,
    )
    return _optimized(model, example_inputs, settings, progress=progress, cache=cache)


def optimize_as_decided(
    decision: Decision | None, model: nn.Module, calls: list[CallArguments], **settings: Any
) -> tuple[OptimizedModule, list[str]]:
    """The same with a decision that came from elsewhere, if it holds here; and sentences that say why it does not."""
    fast = _optimized(model, calls, Settings(**settings), decision, progress=None, cache=True)
    return fast, [note for note in fast.report.notes if note.startswith(NOT_USED)]


def _optimized(
    model: nn.Module,
    example_inputs: Any,
    settings: Settings,
    given: Decision | None = None,
    *,
    progress: bool | Progress | None,
    cache: bool,
) -> OptimizedModule:
    if isinstance(model, OptimizedModule):
        raise RefoldError("the model is optimized already; call .restore() on it first.")
    check_model(model)
    _check_whole(model)
    chosen, fallbacks = settings.selected, Fallbacks(settings.on_fallback)
    (inputs, *others), *further = _calls(model, example_inputs)

    def work() -> OptimizedModule:
        with shown(progress) as report_to:
            job = replace(_job(model, inputs, settings, report_to), given=given)
            job = replace(job, cache=cache_of_user() if cache else None)
            usual = settings.pipeline is None
            by = Preparation(job, others, Place.of(model), settings.time_budget, usual, _prepare, _capture)
            return _for_all_kinds(by, further, None if chosen is None else chosen.of, fallbacks)

    return all_or_nothing(model, work)


def _job(model: nn.Module, inputs: CallArguments, settings: Settings, progress: Progress) -> Job:
    device = inputs.device(model)
    return Job(
        model,
        inputs,
        settings.transformations(device),
        settings.level,
        settings.backend,
        settings.effort,
        settings.budget(model, device),
        progress,
        open_sizes=settings.sizes == "open",
        outputs=settings.selected,
        padding=settings.padding,
        max_memory=as_bytes(settings.max_memory),
    )


def _check_whole(model: nn.Module) -> None:
    check_whole(
        model,
        "refold.optimize runs and compares whole models",
        "Capture the model with refold.trace before that, apply transformations to the graph, and shard the graph.",
    )


def _for_all_kinds(
    by: Preparation,
    further: Sequence[list[CallArguments]],
    select: Callable[[Any], Any] | None,
    fallbacks: Fallbacks,
) -> OptimizedModule:
    """Prepare for the calls that were given: those like the first, then those of other kinds. Calls of sizes that the
    graph of the first does not take are such a kind."""
    job, prepared = by.job, by.first()
    later = replace(by, job=replace(job, progress=silent, given=None))
    fast = OptimizedModule(job.model, prepared, later, select, fallbacks)
    is_other = prepared.graph_module is not None and job.open_sizes
    refused = [[call] for call in by.others if is_other and prepared.why_not(call) is not None]
    for calls in (*further, *refused)[: MOST_KINDS - 1]:
        fast.prepare_calls(calls)
    return fast


def _calls(model: nn.Module, example_inputs: Any) -> list[list[CallArguments]]:
    """The calls that were given, sorted by kind. What fails in one of another kind fails before the long work."""
    given = example_inputs if isinstance(example_inputs, list) else [example_inputs]
    if not given:
        raise BadExample("example_inputs is an empty list; give at least one dict, tuple or tensor.")
    if len(given) > 1 and all(isinstance(each, torch.Tensor) for each in given) and not takes(model, 1):
        raise BadExample("example_inputs is a list, which means several calls; give a tuple for the arguments of one.")
    calls = [CallArguments.of(each).checked() for each in given]
    if calls[0].tensors and all(0 in tensor.shape for tensor in calls[0].tensors):
        raise BadExample(f"an example without a single row ({calls[0].described()}) shows nothing; give a real one.")
    kinds = sorted_by_kind(model, calls)
    for call, *_ in kinds[1:]:
        with untouched(model), torch.no_grad():
            first_call(model, call.copy())
    return kinds


def _prepare(job: Job, others: Sequence[CallArguments]) -> Prepared:
    """The fastest ways to run a model; whatever calls change in the model meanwhile is put back."""
    with torch.inference_mode(False):  # weights that are merged there could not be trained any more
        job = replace(job, inputs=job.inputs.copy())
        state = ModelState(job.model, parameters=False)  # merged ones lie elsewhere afterwards
        try:
            prepared = _run_stages(job, others)
        finally:
            state.put_back()
        ways = [way for way in prepared.ways if way.executor != ORIGINAL]
        for way in ways:
            way.watch.watch_modules(job.model)
        if prepared.inventory is not None:
            copied = [tensor for way in ways for tensor in way.watch.copied]
            prepared.inventory = prepared.inventory.with_weights(job.model, names_of(job.model, copied))
        return prepared


def _run_stages(job: Job, others: Sequence[CallArguments]) -> Prepared:
    if job.backend != "auto":
        available_executor(job.backend, job.device)  # checked before the long work
    with keeping(job, others) as keeper:
        job.progress("capturing", 0.0)
        prepared = keeper.use(lambda decision, weights: _as_decided(job, others, keeper, decision, weights))
        prepared = _decided_anew(job, others, keeper) if prepared is None else prepared
        report = replace(prepared.report, notes=(*prepared.report.notes, *keeper.notes))
        return replace(prepared, report=report)


def _as_decided(
    job: Job, others: Sequence[CallArguments], keeper: Keeper, decision: Decision, weights: str
) -> Prepared:
    """The ways to run a model that were decided on before, compared with the model; `BadDecision` where they cannot
    be."""
    captured = _capture(job)
    job.budget.captured()
    if isinstance(captured, str):
        raise BadDecision(captured)
    inventory = Inventory.of(job.model, captured)
    job, _ = _with_zeros(job, captured)
    is_open = bool(to_race(job, decision))
    calls = _calls_of_other_sizes(job, captured, others, is_quick=not is_open)
    if is_open:
        job = _with_other_sizes(job, calls)
    try:
        found = redo(job, captured, calls, decision, weights, _choose)
        prepared = _prepared(job, found.gm, found.choice, found.report)
    except BaseException:
        if history(captured):
            alone(lambda: undo_below(captured))
        raise
    again = keeper.decided_again(decision, weights, found)
    report = replace(found.report, notes=(*found.report.notes, found.sentence(decision)))
    return _completed(job, replace(prepared, report=report, decision=again), inventory)


def _completed(job: Job, prepared: Prepared, inventory: Inventory | None) -> Prepared:
    gm = prepared.graph_module
    rewrites = () if gm is None else tuple(change.signature for change in history(gm))
    return replace(prepared, inventory=inventory, zeroed=job.zeroed, rewrites=rewrites)


def _decided_anew(job: Job, others: Sequence[CallArguments], keeper: Keeper) -> Prepared:
    with untouched(job.model):
        reason = why_not_comparable(job.model, job.inputs)
        changes = None if reason else why_stateful(job.model, job.inputs)
        if job.outputs is not None:
            job.outputs.of(job.call(job.model))  # names that the model does not give are refused
    if reason:
        return _unoptimized(job, reason)
    if changes:  # the plain way to run it is the model itself
        return _unoptimized(job, changes, names=("auto", Plain.name))
    captured = _capture(job)
    job.budget.captured()
    if isinstance(captured, str):
        notes, inventory, before = [captured, *_no_zeros(job)], None, ""
        rewritten = Rewritten(None, None, GraphData(), [], OutputReference.of(job.model, job.inputs))
    else:
        inventory = Inventory.of(job.model, captured)
        job, notes = _with_zeros(job, captured)
        before = "" if history(captured) else digest_of_graph(captured)
        job = _with_other_sizes(job, _calls_of_other_sizes(job, captured, others))
        notes += size_notes(captured) if job.open_sizes else []
        rewritten = rewrite(job.part(0.1, 0.55), captured)
        notes += hints_about_padding(step.result for step in rewritten.steps)
    job, notes = _with_sizes_that_agree(job, rewritten, notes)
    rewritten, choice = _choose(job.part(0.55, 1.0), rewritten)
    report = build_report(job.model, rewritten, choice, [*rewritten.notes, *notes])
    report = _with_work(job, rewritten, choice, report)
    decision = keeper.keep(keeper.decide(before, rewritten.gm, choice, report))
    return _completed(job, replace(_prepared(job, rewritten.gm, choice, report), decision=decision), inventory)


def _with_zeros(job: Job, captured: GraphModule) -> tuple[Job, list[str]]:
    """The job with zeros at padding in its graph, if nobody reads outputs there; and what the report says of it."""
    if job.padding is None:
        return job, []
    found = zero_outputs(captured, job.model, job.inputs)
    return (job, [found]) if isinstance(found, str) else (replace(job, zeroed=found), [found.note])


def _no_zeros(job: Job) -> list[str]:
    """What the report says of padding where there is no graph to write zeros into."""
    return [] if job.padding is None else ["padding='zeros' makes no difference: there is no graph of the model."]


def _calls_of_other_sizes(
    job: Job, captured: GraphModule, given: Sequence[CallArguments], *, is_quick: bool = False
) -> list[CallArguments] | None:
    """Calls of other sizes: those that were given, or drawn ones; None where sizes are fixed. Quickly, it is one call,
    which the model may not take."""
    if not (job.open_sizes and has_open_sizes(captured)):
        return None
    taken = [call for call in given if why_refused(captured, call.args, call.kwargs) is None]
    return taken or draw_calls(job.inputs, captured, job.model, 1 if is_quick else 2, tried=not is_quick)


def _with_other_sizes(job: Job, calls: list[CallArguments] | None) -> Job:
    """The job with calls of other sizes."""
    if calls is None:
        return job
    model = job.original if job.outputs is None else job.outputs.called(job.original)
    return replace(job, others=OtherSizes(model, calls, job.rounding))


def _with_sizes_that_agree(job: Job, rewritten: Rewritten, notes: list[str]) -> tuple[Job, list[str]]:
    """The job for the example's sizes alone, where the rewritten graph is wrong at others."""
    gm, others = rewritten.gm, job.others
    if gm is None or others is None or (objection := others.objection(gm)) is None:
        return job, notes
    why = f"Other sizes than the example's run the original, because the rewritten graph is not the model {objection}"
    return replace(job, others=None), [*notes, why]


def _with_work(job: Job, rewritten: Rewritten, choice: ExecutorChoice, report: Report) -> Report:
    """The report with the work that is left out, and how near the original comes to what the machine can multiply."""
    before, after, found = rewritten.unrewritten, rewritten.gm, choice.comparison
    if choice.name != ORIGINAL and rewritten.is_changed and before is not None and after is not None:
        report = replace(report, left_out=work_left_out(job, before, after))
    if found is not None and ORIGINAL in found.timings and job.effort != "quick":
        report = replace(report, headroom=headroom(job, found.timings[ORIGINAL].median))
    return report


def _unoptimized(job: Job, why: str, *, names: tuple[str, ...] = ("auto",)) -> Prepared:
    """The model itself, where nothing can be compared with it; for the backends of these names."""
    if job.backend not in names:
        raise RefoldError(f"the executor {job.backend} cannot be used for this model: {why}.")
    choice = ExecutorChoice(ORIGINAL, job.model, True)
    report = build_report(job.model, None, choice, [f"The model is run as it is: {why}.", *_no_zeros(job)])
    way = Way(ORIGINAL, job.model, Watch([], None, reads_live_weights=True))
    args, kwargs = job.arguments
    return Prepared(Spelling(job.model.forward, args, kwargs), InputSpec.of(args, kwargs), None, way, None, report)


def _capture(job: Job) -> GraphModule | str:
    """The model as a graph, for all sizes that it leaves open where the job is for other sizes too; or a note that says
    why it cannot be captured."""
    model, (args, kwargs) = job.model, job.arguments
    try:
        if isinstance(model, GraphModule):
            captured = shared_copy(model)  # the given one stays as it is: it is what runs on other inputs
        else:
            with torch.no_grad():
                captured = trace(model, *args, dynamic="auto" if job.open_sizes else False, whole_result=True, **kwargs)
    except CaptureError as error:
        return f"The model could not be captured, so it is run as it is: {error}{_hint_about_cache(model, kwargs)}"
    if job.outputs is not None:
        job.outputs.cut(captured)
    return captured


def _hint_about_cache(model: nn.Module, given: dict[str, Any]) -> str:
    """What to try with a model whose result holds a cache."""
    if "use_cache" in given or "use_cache" not in inspect.signature(model.forward).parameters:
        return ""
    return " If its cache is in the way and not needed: give use_cache=False, in the example and in every call."


def _choose(job: Job, rewritten: Rewritten) -> tuple[Rewritten, ExecutorChoice]:
    """The executors that run the model, and the graph that they run: without the rewrites where they do not help."""
    choice = choose(job, rewritten, functools.partial(_as_called, job, rewritten.gm))
    gm = rewritten.gm
    if gm is not None and choice.rewrites_hinder:
        if choice.at_any_size is not None and not choice.reads_live_weights:
            return rewritten, choice  # it runs a copy without them, and the other sizes run with them
        rewritten = rewritten.reverted(job, f"{choice.name} runs the model as fast without the rewrites.")
        if choice.reads_live_weights:  # it reads them from where they lay, and merged ones have just moved
            choice.prepare_again(gm, job)
    return rewritten, choice


def _as_called(
    job: Job,
    gm: GraphModule | None,
    executor: Executor,
    run: Callable[..., Any],
) -> Callable[..., Any]:
    """A way to run a model, with the checks that a call of the optimized model makes around it."""
    way = _way(job, gm, executor.name, run, executor.reads_live_weights)
    way.watch.watch_modules(job.model)
    prepared = _put_together(job, gm, way, way if executor.takes_any_size else None, Report("", ModelSummary("")))

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return prepared.run(prepared.checked(args, kwargs))
        except UnsupportedInput:  # other candidates write into the model: what is timed are the checks all the same
            return run(*args, **kwargs)

    return call


def _prepared(job: Job, gm: GraphModule | None, choice: ExecutorChoice, report: Report) -> Prepared:
    way = _way(job, gm, choice.name, choice.run, choice.reads_live_weights)
    other, found = None, choice.at_any_size
    if found is not None:
        is_same = found.run is choice.run
        other = way if is_same else _way(job, gm, found.name, found.run, found.reads_live_weights)
    return _put_together(job, gm, way, other, report)


def _way(job: Job, gm: GraphModule | None, name: str, run: Callable[..., Any], reads_live_weights: bool) -> Way:
    weights = [] if name == ORIGINAL else read_in_eval(job.model)
    return Way(name, run, Watch(weights, gm, reads_live_weights=reads_live_weights))


def _put_together(job: Job, gm: GraphModule | None, way: Way, other: Way | None, report: Report) -> Prepared:
    args, kwargs = job.arguments
    spec = InputSpec.of(args, kwargs, open_sizes=job.open_sizes and gm is not None)
    refusal = functools.partial(why_refused, gm) if gm is not None else None
    return Prepared(Spelling(job.model.forward, args, kwargs), spec, gm, way, other, report, refusal)
