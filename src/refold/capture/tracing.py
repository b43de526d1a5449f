"""Capture: any nn.Module becomes a torch.fx.GraphModule of its own modules that people can read and rewrite.

One model is captured at a time, and calls of modules in other threads wait meanwhile, because tracing changes things
that all threads share (parameters in their modules, switches of torch); they are put back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import fx, nn

from refold.capture.captured import Captured, record_of
from refold.capture.example_inputs import make_inputs
from refold.capture.exclusive import alone
from refold.capture.model_state import all_or_nothing
from refold.capture.partial import REPORT, capture_parts, capture_submodule
from refold.capture.python_operators import use_python_operators
from refold.capture.strategies import capture_model
from refold.capture.summary import CaptureReport
from refold.errors import CaptureError, InputMismatch
from refold.record.sharded_modules import check_whole


def trace(
    model: nn.Module,
    *args: Any,
    dynamic: Any = "auto",
    on_failure: Literal["raise", "partial"] = "raise",
    submodule: str | None = None,
    whole_result: bool = False,
    operators: Literal["aten", "python"] = "aten",
    **kwargs: Any,
) -> fx.GraphModule:
    """Capture ``model`` as it runs on ``model(*args, **kwargs)``.

    The result is a `torch.fx.GraphModule` that is called as the model is, gives what the model gives, and whose leaf
    modules and parameters are the model's own objects under their own names. It was compared with the model bit for
    bit on the example and, where sizes are left open, on other sizes; `capture_report` says what was found.

    ``dynamic``: ``"auto"`` leaves batch, sequence and other sizes open where the model allows; ``"all"`` heights and
    widths of images as well, which takes longer; ``False`` fixes all; torch.export's dynamic shapes (a dict by argument
    name) say it in detail.
    ``on_failure``: ``"partial"`` gives, where the whole cannot be captured, a copy of the model's structure with its
    largest parts captured (see `captured_parts`); ``"raise"`` an error that names the line, the reason and what to try.
    ``submodule``: capture only this part, on what the model gives it when it runs on the inputs.
    ``whole_result``: give all that the model gives. Otherwise a model is captured as if called with
    ``use_cache=False``, and what cannot be part of a graph is left out of its result; here that is an error.
    ``operators``: ``"python"`` writes calls as Python operators, torch functions and methods wherever one means exactly
    the same as the ATen call, for passes that look for those; transformations of Refold take both.
    """
    _check_settings(model, on_failure, submodule, whole_result)
    if operators not in ("aten", "python"):
        raise CaptureError(f"operators={operators!r} is not known: use 'aten' or 'python'.")
    capture = partial(capture_model, dynamic=dynamic)

    def captured() -> nn.Module:
        try:
            if submodule is not None:
                return capture_submodule(model, submodule, args, kwargs, capture)
            return _trace_whole(model, args, kwargs, dynamic, whole_result)
        except CaptureError as error:
            if submodule is not None or on_failure == "raise" or isinstance(error, InputMismatch):
                raise
            return capture_parts(model, args, kwargs, capture, error)

    found = alone(lambda: all_or_nothing(model, captured))
    for part in captured_parts(found).values() if operators == "python" else ():
        use_python_operators(part)
        record_of(part).report.asked["operators"] = operators
    return found  # type: ignore[return-value]


def _check_settings(model: nn.Module, on_failure: str, submodule: str | None, whole_result: bool) -> None:
    if on_failure not in ("raise", "partial"):
        raise CaptureError(f"on_failure={on_failure!r} is not known: use 'raise' or 'partial'.")
    if whole_result and submodule is not None:
        raise CaptureError("whole_result is about the result of the whole model: it cannot be given with submodule.")
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            f"{type(model).__name__} is a TorchScript module, which holds its own graph and no Python to follow: give "
            "refold.trace the model it was made from."
        )
    check_whole(
        model,
        "torch captures no model with sharded weights",
        "Capture it before that, on the CPU or under torch.device('meta'), rewrite the graph, and give the graph to "
        "fully_shard or parallelize_module.",
        CaptureError,
    )


def _trace_whole(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: Any, whole_result: bool
) -> fx.GraphModule:
    captured = capture_model(model, args, kwargs, dynamic, whole_result)
    record = record_of(captured)
    if whole_result and record.report.left_out:
        what = ", ".join(record.report.left_out)
        raise CaptureError(f"The result of {type(model).__name__} holds what no graph can make: {what}.")
    if dynamic is False or dynamic == "all":
        record.report.asked["dynamic"] = dynamic
    if whole_result:
        record.report.asked["whole_result"] = True
    return captured


def symbolic_trace(
    model: nn.Module, input_names: Sequence[str] | None = None, disable_check: bool = False
) -> fx.GraphModule:
    """Capture a model by the names of its inputs; examples are made from its configuration and signature.

    This is the call that users of the tracer removed from transformers know, and it gives what they know: Python
    operators, torch functions and methods instead of ATen calls, wherever they mean exactly the same, and all sizes
    that the model leaves open, those of images included.
    ``disable_check`` is accepted and has no meaning here: there is no list of supported models, and every captured
    graph is compared with its model. A name for which no example can be made raises `NeedsInputs`: give real inputs to
    `trace` then.
    """
    inputs: dict[str, Any] = dict(make_inputs(model, input_names))
    return trace(model, operators="python", dynamic="all", **inputs)


def capture_report(module: nn.Module) -> CaptureReport:
    """What capture did with this module, or with the parts of it that could be captured."""
    report = vars(module).get(REPORT)
    return report if report is not None else record_of(module).report


def captured_parts(module: nn.Module) -> dict[str, fx.GraphModule]:
    """The captured graphs inside a partly captured model, by path; a whole capture is its own only part."""
    return {path: part for path, part in module.named_modules() if isinstance(part, Captured)}


def original_model(module: nn.Module) -> nn.Module:
    """The eager model a graph was captured from (in a deep copy: its own copy of it)."""
    model = record_of(module).original.model
    if model is None:
        raise CaptureError(
            "The original model is not stored when a captured module is pickled; parameters that the graph never reads "
            "are: see refold.unread_parameters."
        )
    return model


def unread_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters of the original model that the graph never reads, by their own names."""
    return dict(record_of(module).unread)
