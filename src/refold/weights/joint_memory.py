"""Tensors that are parts of one memory already, as weights are that another graph of the same model has merged."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from refold import fx_private


def joint_memory(rows: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Tensors put together along their first dimension, over their own memory, where they lie there in this order with
    nothing between them."""
    first = rows[0].detach()
    if first.is_meta or fx_private.storage_of(first) is None or not all(row.is_contiguous() for row in rows):
        return None
    end, storage = first.storage_offset(), fx_private.storage_of(first)
    for row in rows:
        if fx_private.storage_of(row) != storage or row.storage_offset() != end or row.dtype != first.dtype:
            return None
        end += row.numel()
    shape = (sum(row.shape[0] for row in rows), *first.shape[1:])
    whole = first.new_empty(0)  # with a count of its own for writes in place
    return whole.set_(first.untyped_storage(), first.storage_offset(), shape)  # type: ignore[call-overload]
