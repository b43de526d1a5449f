"""What is expected of each way to run a model before it is tried: how much faster it may be, how long preparing takes.

One table of rules of thumb, seen on a CPU with BERT-base. It decides only what is tried first, and what does not fit a
time budget; what is chosen is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from refold.executors import Executor
from refold.optimization.budget import Budget


@dataclass(frozen=True)
class Expectation:
    """A speed-up over the plain graph, and what preparing takes: seconds, and so many times what capturing took."""

    gain: float
    seconds: float
    captures: float

    def preparing(self, capturing: float) -> float:
        """Seconds that preparing takes."""
        return self.seconds + self.captures * capturing


_UNKNOWN = Expectation(1.1, 1.0, 3.0)
_TABLE = {
    "plain": Expectation(1.0, 0.0, 0.1),
    "onednn": Expectation(1.3, 0.0, 0.1),
    "openvino-open": Expectation(1.6, 1.0, 2.0),
    "openvino": Expectation(1.5, 1.0, 1.7),
    "onnxruntime-open": Expectation(1.45, 1.0, 3.0),
    "onnxruntime": Expectation(1.4, 1.0, 3.0),
    "onnxruntime-opset23": Expectation(1.4, 1.0, 3.0),
    "compile-freezing": Expectation(1.3, 4.0, 5.0),
    "compile-freezing-autotune": Expectation(1.35, 60.0, 20.0),
    "compile-open": Expectation(1.1, 5.0, 4.0),
    "compile": Expectation(1.15, 4.0, 4.0),
    "packed+cuda_graph": Expectation(5.0, 8.0, 1.0),
    "compile-open+cuda_graph": Expectation(3.6, 5.0, 3.0),
    "cuda_graph": Expectation(2.5, 0.5, 0.3),
    "compile+cuda_graph": Expectation(3.5, 4.0, 3.0),
    "compile-fused+cuda_graph": Expectation(3.6, 4.0, 3.0),
    "compile-freezing+cuda_graph": Expectation(3.5, 5.0, 4.0),
    "compile-autotune+cuda_graph": Expectation(3.7, 60.0, 20.0),
    "compile-autotune": Expectation(1.8, 60.0, 20.0),
    "compile-reduce-overhead": Expectation(3.0, 5.0, 4.0),
}
_AT_ONCE = 1.0  # seconds
_LATE = " of the time budget are left"


def expected_of(executor: Executor) -> Expectation:
    """What is expected of an executor, those of other packages included."""
    return _TABLE.get(executor.name, _UNKNOWN)


def most_promising_first(executors: Iterable[Executor], capturing: float) -> list[Executor]:
    """By expected gain for each second of preparing; what is ready at once comes first in any case."""

    def promise(executor: Executor) -> float:
        expected = expected_of(executor)
        return math.log(expected.gain) / max(expected.preparing(capturing), 1e-3)

    found = list(executors)
    at_once = [e for e in found if _is_ready_at_once(e)]
    return at_once + sorted((e for e in found if e not in at_once), key=promise, reverse=True)


def why_not_in_time(executor: Executor, budget: Budget) -> str | None:
    """Why there is no time left for preparing an executor."""
    seconds = expected_of(executor).preparing(budget.capturing)
    if seconds <= budget.left or (budget.is_usual and _is_ready_at_once(executor)):
        return None
    return f"preparing it takes about {seconds:.0f} s, and {budget.left:.0f} s{_LATE}"


def is_out_of_time(reason: str) -> bool:
    """Whether an executor was left out for want of time."""
    return reason.endswith(_LATE)


def _is_ready_at_once(executor: Executor) -> bool:
    expected = expected_of(executor)
    return expected.seconds <= _AT_ONCE and expected.captures < 1
