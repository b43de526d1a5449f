"""Capture: any nn.Module becomes a torch.fx.GraphModule of its own modules that people can read and rewrite.

Capture takes a lock: one model is captured at a time. It must not run while another thread runs models, because
tracing changes things that all threads share (torch.fx patches ``nn.Module`` itself, random states are put back).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import fx, nn

from refold.capturing.dummy_inputs import make_inputs
from refold.capturing.errors import CaptureError, InputMismatch
from refold.capturing.ladder import climb
from refold.capturing.module import record_of
from refold.capturing.partial import REPORT, capture_parts, capture_submodule, parts_of
from refold.capturing.report import CaptureReport

__all__ = [
    "CaptureReport",
    "capture_report",
    "captured_parts",
    "original_model",
    "symbolic_trace",
    "trace",
    "unread_parameters",
]

_LOCK = threading.RLock()


def trace(
    model: nn.Module,
    *args: Any,
    dynamic: Any = "auto",
    on_failure: Literal["raise", "partial"] = "raise",
    submodule: str | None = None,
    whole_result: bool = False,
    **kwargs: Any,
) -> fx.GraphModule:
    """Capture ``model`` as it runs on ``model(*args, **kwargs)``.

    The result is a `torch.fx.GraphModule` that is called as the model is, gives what the model gives, and whose leaf
    modules and parameters are the model's own objects under their own names. It was compared with the model bit for
    bit on the example and, where sizes are left open, on other sizes; `capture_report` tells what was found.

    ``dynamic``: ``"auto"`` leaves batch, sequence and other sizes open where the model allows; ``False`` fixes all;
    torch.export's dynamic shapes (a dict by argument name) say it in detail.
    ``on_failure``: ``"partial"`` gives, where the whole cannot be captured, a copy of the model's structure with its
    largest parts captured (see `captured_parts`); ``"raise"`` an error that names the line, the reason and what to try.
    ``submodule``: capture only this part, on what the model gives it when it runs on the inputs.
    ``whole_result``: give all that the model gives. Otherwise a model is captured as if called with
    ``use_cache=False``, and what cannot be part of a graph is left out of its result; here that is an error.
    """
    if on_failure not in ("raise", "partial"):
        raise CaptureError(f"on_failure={on_failure!r} is not known: use 'raise' or 'partial'.")
    if whole_result and submodule is not None:
        raise CaptureError("whole_result is about the result of the whole model: it cannot be given with submodule.")
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            f"{type(model).__name__} is a TorchScript module, which holds its own graph and no Python to follow: give "
            "refold.trace the model it was made from."
        )
    with _LOCK:
        if submodule is not None:
            return capture_submodule(model, submodule, args, kwargs, partial(climb, dynamic=dynamic))
        try:
            captured = climb(model, args, kwargs, dynamic, whole_result)
            record = record_of(captured)
            if whole_result and record.report.left_out:
                what = ", ".join(record.report.left_out)
                raise CaptureError(f"The result of {type(model).__name__} holds what no graph can make: {what}.")
            asked: dict[str, Any] = {"dynamic": dynamic} if dynamic is False else {}
            asked |= {"whole_result": True} if whole_result else {}
            record.report = dataclasses.replace(record.report, asked=asked)
            return captured
        except CaptureError as error:
            if on_failure == "raise" or isinstance(error, InputMismatch):
                raise
            return capture_parts(model, args, kwargs, partial(climb, dynamic=dynamic), error)  # type: ignore[return-value]


def symbolic_trace(
    model: nn.Module, input_names: Sequence[str] | None = None, disable_check: bool = False
) -> fx.GraphModule:
    """Capture a model by the names of its inputs; examples are made from its configuration and signature.

    This is the call that users of the tracer removed from transformers know. ``disable_check`` is accepted and has no
    meaning here: there is no list of supported models, and every captured graph is compared with its model. A name for
    which no example can be made raises `NeedsInputs`: give real inputs to `trace` then.
    """
    inputs: dict[str, Any] = dict(make_inputs(model, input_names))
    return trace(model, **inputs)


def capture_report(module: nn.Module) -> CaptureReport:
    """What capture did with this module, or with the parts of it that could be captured."""
    report = vars(module).get(REPORT)
    return report if report is not None else record_of(module).report


def captured_parts(module: nn.Module) -> dict[str, fx.GraphModule]:
    """The captured graphs inside a partly captured model, by path; a whole capture is its own only part."""
    return dict(parts_of(module))


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
