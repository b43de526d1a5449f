"""Why a model could not be captured: the line of its own source, the reason in words, and what to try."""

from __future__ import annotations

import dataclasses
import re
import traceback
from pathlib import Path

import torch

_HERE = str(Path(__file__).resolve().parent.parent)
_TORCH = str(Path(torch.__file__).resolve().parent)
_VALUE_STEERS = (
    "GuardOnDataDependentSymNode",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "data-dependent",
    "aten._local_scalar_dense",
    "unbacked",
)


@dataclasses.dataclass(frozen=True)
class Failure:
    """One failed way of capturing: how, where in the model's source, and why."""

    method: str
    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.method}: {self.why}" + (f" (at {self.where})" if self.where else "")


def explain(method: str, error: BaseException) -> Failure:
    """Put an exception of a tracer into words."""
    return Failure(method, _model_line(error), _reason(error))


def steered_by_values(error: BaseException) -> bool:
    """Whether Python had to decide by a tensor's value: other sizes will not help then."""
    text = f"{type(error).__name__} {error}"
    return any(sign in text for sign in _VALUE_STEERS)


def _reason(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    first = re.sub(r"\s+", " ", lines[0])[:240] if lines else ""
    if steered_by_values(error):
        return f"the value of a tensor steers Python there (an if, a loop, a size): {first}"
    return f"{type(error).__name__}: {first}"


def _model_line(error: BaseException) -> str:
    """The innermost line outside torch and Refold: that is the model's own."""
    frames = []
    seen: BaseException | None = error
    while seen is not None:
        frames += [f for f in traceback.extract_tb(seen.__traceback__) if _is_model_code(f.filename)]
        seen = seen.__cause__
    if not frames:
        return ""
    frame = frames[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"


def _is_model_code(filename: str) -> bool:
    path = str(Path(filename).resolve()) if not filename.startswith("<") else filename
    return not path.startswith((_HERE, _TORCH, "<"))
