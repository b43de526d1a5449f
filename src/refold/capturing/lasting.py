"""What a call leaves behind in a model must be there after a call of the graph, and later calls must find it.

A graph writes into buffers and sets no attributes. An attribute that is the same after every call (a mask or an index
that is made once) is no loss. One that goes on from call to call is, and so is one that a later call reads. One that
only follows the inputs, for others to look at, is told in a note.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from refold.capturing.calling import Calling
from refold.capturing.checking import attributes_left, run_in_a_row, unlike
from refold.capturing.errors import NeverCapturable


def check_what_lasts(
    model: nn.Module,
    captured: nn.Module,
    calling: Calling,
    leaves: Sequence[torch.Tensor],
    left: Mapping[str, Any],
    steering: Collection[Any],
) -> list[str]:
    """Notes on what calls of the graph do not leave behind; raises where they cannot stand for calls of the model.

    ``left``: what the first call changed. ``steering``: inputs whose values must stay as they are.
    """
    other = [leaf if i in steering else _other_values(leaf) for i, leaf in enumerate(leaves)]
    try:
        # a model that has run on the example before may find everything as it leaves it
        left = {**left, **run_in_a_row(model, calling, [other])[0].left}
        calls = [other, leaves, leaves]
    except Exception:  # not every model takes other values
        calls = [leaves, leaves]
    if not left:
        return []
    expected, got = run_in_a_row(model, calling, calls), run_in_a_row(captured, calling, calls, watched=model)
    attributes = attributes_left(model, left)
    why = unlike(model, expected[-2], got[-2]) or unlike(model, expected[-1], got[-1])
    if why:
        raise NeverCapturable(
            f"its calls change {', '.join(attributes or left)}, and a later call of the graph is not the model's: {why}"
        )
    going_on = [name for name in attributes if name in expected[-1].left]
    if going_on:
        raise NeverCapturable(
            f"every call of the model changes {', '.join(going_on)}, which a graph cannot; a registered buffer can be "
            "changed by both"
        )
    following = [name for name in attributes if name in expected[-2].left]
    return [f"calls of the model set {name}, those of the graph do not" for name in following]


def _other_values(leaf: torch.Tensor) -> torch.Tensor:
    """An input of the same kind with other values: numbers in another order, masks as they are."""
    if leaf.dtype == torch.bool or not leaf.dim():
        return leaf
    if not leaf.is_floating_point():
        return leaf.flip(-1)
    return 0.75 * leaf.flip(list(range(leaf.dim())))
