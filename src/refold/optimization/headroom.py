"""How far a model is from what this machine can multiply: one line for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from refold.measurement.clock import seconds_of
from refold.optimization.job import Job
from refold.report.data import Headroom

_MOST_SHAPES = 3  # that are calibrated: those of most of the work
_FEW_CALLS, _MANY_CALLS = 2, 8
_LONG_CALL = 0.01  # seconds
_FACTORS = {"aten.mm.default": 0, "aten.addmm.default": 1}
_Shape = tuple[int, int, int, torch.dtype]


class _Products(TorchDispatchMode):
    """Which products of matrices a call consists of: rows, inner size and columns of each, and how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[_Shape] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = _FACTORS.get(str(func))
        if place is not None:
            a, b = args[place], args[place + 1]
            self.counts[a.shape[0], a.shape[1], b.shape[1], a.dtype] += 1
        return func(*args, **(kwargs or {}))


def headroom(job: Job, seconds: float) -> Headroom | None:
    """What part of the time that the original takes its products of matrices would take alone, by `torch.mm` here, at
    their own sizes; None where the work is of another kind or cannot be counted."""
    try:
        total, products = _count(job.call, job.model)
    except Exception:  # not every operator can be seen by a mode
        return None
    work = {shape: 2 * shape[0] * shape[1] * shape[2] * count for shape, count in products.items()}
    if not total or sum(work.values()) < total / 2:
        return None
    largest = sorted(work, key=work.__getitem__, reverse=True)[:_MOST_SHAPES]
    calibrated = sum(_seconds_of_product(shape, job.device) * products[shape] for shape in largest)
    alone = calibrated * sum(work.values()) / sum(work[shape] for shape in largest)
    share = min(alone / seconds, 1.0)
    sentence = (
        f"The original does {total / seconds / 1e9:.3g} GFLOP/s; torch.mm would do its matrix products in {share:.0%} "
        f"of that time here, and {1 - share:.0%} is outside of them."
    )
    return Headroom(sentence, share)


def _count(call: Callable[[Callable[..., Any]], Any], model: Callable[..., Any]) -> tuple[int, Counter[_Shape]]:
    with FlopCounterMode(display=False) as counter, _Products() as products:
        call(model)
    return counter.get_total_flops(), products.counts


def _seconds_of_product(shape: _Shape, device: torch.device) -> float:
    rows, inner, columns, dtype = shape
    a, b = (torch.full(size, 0.5, device=device, dtype=dtype) for size in ((rows, inner), (columns, inner)))
    once = min(seconds_of(lambda: torch.mm(a, b.t()), 1, device) for _ in range(2))
    times = _FEW_CALLS if once > _LONG_CALL else _MANY_CALLS
    return seconds_of(lambda: torch.mm(a, b.t()), times, device)
