"""What a call of the rewritten graph does not compute any more: tokens that are padding, and products of matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from refold.optimization.job import Job
from refold.patterns.packing.token_operators import OPERATORS
from refold.report.data import LeftOut


def work_left_out(job: Job, before: GraphModule, after: GraphModule) -> tuple[LeftOut, ...]:
    """The work of a call of the job in both graphs, of each kind of which there is less; nothing where it cannot be
    counted."""
    try:
        products, fewer = _products(job, before), _products(job, after)
        places, kept = _tokens(job, after)
    except Exception:  # not every operator can be seen by a mode
        return ()
    tokens = LeftOut("tokens", places, kept, "which are padding in the example")
    counted = LeftOut("products", products, fewer, "multiplications in matrix products and convolutions")
    return tuple(work for work in (tokens, counted) if work.after < work.before)


class _TokenPlans(TorchDispatchMode):
    """How many places the batches of a call have, and how many of them are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.places = self.kept = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is OPERATORS.token_plan.default:
            self.places += int(args[1]) * int(args[2])
            self.kept += found.numel()
        return found


def _tokens(job: Job, gm: GraphModule) -> tuple[int, int]:
    with _TokenPlans() as plans:
        job.call(gm)
    return plans.places, plans.kept


def _products(job: Job, gm: GraphModule) -> int:
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
        job.call(gm)
    return int(counter.get_total_flops()) // 2


def _flops_on_cpu(query: Any, key: Any, value: Any, *rest: Any, **settings: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _flops_of_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    spans: Tensor,
    masks: Tensor,
    rows: int,
    length: int,
    *rest: Any,
    **settings: Any,
) -> int:
    """Each sequence by itself, or the whole grid where nothing is left out."""
    lengths = [stop - start for start, stop, *_ in spans.tolist()] or [int(length)] * int(rows)
    return sum(2 * query.shape[1] * n * n * (query.shape[3] + value.shape[3]) for n in lengths)


_flops_of_packed._get_raw = True  # type: ignore[attr-defined]  # it reads the spans' values, where others read shapes
_ATTENTION = {
    OPERATORS.packed_attention: _flops_of_packed,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flops_on_cpu,
}
"""The operators that torch's counter does not know."""
