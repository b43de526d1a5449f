"""Why an attempt to capture failed: the line of the model's own source, and the reason in words."""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

from refold.wording import first_line

_HERE = str(Path(__file__).resolve().parent.parent)
_TORCH = str(Path(torch.__file__).resolve().parent)
_PYTHON = str(Path(os.__file__).resolve().parent)
_DATA_DEPENDENT = (
    "GuardOnDataDependentSymNode",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "data-dependent",
    "aten._local_scalar_dense",
    "unbacked",
)


@dataclasses.dataclass(frozen=True)
class Failure:
    """One failed attempt: how it was made, and what a tracer or the model's code raised."""

    method: str
    error: Exception

    def __str__(self) -> str:
        return f"{self.method}: {self.why}" + (f" (at {self.where})" if self.where else "")

    @property
    def why(self) -> str:
        """The reason in words."""
        reason = "control flow depends on the value of a tensor there (an if, a loop, a size): "
        return (reason if depends_on_values(self.error) else "") + first_line(self.error)

    @property
    def where(self) -> str:
        """The line of the model that failed. Empty where there is none."""
        frames: list[traceback.FrameSummary] = []
        seen: BaseException | None = self.error
        while seen is not None:
            frames += traceback.extract_tb(seen.__traceback__)
            seen = seen.__cause__
        return model_line(frames)


def model_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """The innermost line outside torch, Refold and Python's library, which is the model's own; empty where none is."""
    own = [frame for frame in frames if _is_model_code(frame.filename)]
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}: {own[-1].line}" if own else ""


def depends_on_values(error: BaseException) -> bool:
    """Whether control flow depended on a tensor's value: other sizes will not help then."""
    text = f"{type(error).__name__} {error}"
    return any(sign in text for sign in _DATA_DEPENDENT)


@cache
def _is_model_code(filename: str) -> bool:
    path = str(Path(filename).resolve()) if not filename.startswith("<") else filename
    is_python = path.startswith(_PYTHON) and "-packages" not in path
    return not is_python and not path.startswith((_HERE, _TORCH, "<"))
