"""Capture: any nn.Module becomes a torch.fx.GraphModule of its own modules that people can read and rewrite.

Capture takes a lock: one model is captured at a time. It must not run while another thread runs models, because
tracing changes things that all threads share (torch.fx patches ``nn.Module`` itself, random states are put back).
"""

from __future__ import annotations

import threading
from typing import Any, Literal

import torch
from torch import fx, nn

from refold.capturing.errors import CaptureError
from refold.capturing.module import record_of
from refold.capturing.report import CaptureReport
from refold.capturing.whole import NotCaptured, capture_whole

__all__ = ["CaptureReport", "capture_report", "original_model", "trace", "unread_parameters"]

_LOCK = threading.RLock()


def trace(
    model: nn.Module,
    *args: Any,
    dynamic: Any = "auto",
    on_failure: Literal["raise", "partial"] = "raise",
    submodule: str | None = None,
    **kwargs: Any,
) -> fx.GraphModule:
    """Capture ``model`` as it runs on ``model(*args, **kwargs)``."""
    with _LOCK:
        try:
            return capture_whole(model, args, kwargs, dynamic)
        except NotCaptured as failed:
            raise CaptureError(f"{type(model).__name__} could not be captured. {failed}") from failed.cause


def capture_report(module: nn.Module) -> CaptureReport:
    """What capture did with this module."""
    return record_of(module).report


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
