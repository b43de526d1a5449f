"""A second example, where the first one has a mask of ones: the same inputs with padding.

A mask is all ones in most examples and not in most batches, and where it is zero engines go their own ways: what a
model leaves finite for a query that may look at nothing, another attention kernel turns into NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from refold.call_arguments import CallArguments
from refold.executors.exported_engine import disagreement
from refold.nested import CALL, OUTPUT, flatten, rebuild


class PaddedExample:
    """What a module gives for the padded example; `places` are those of the masks among the tensors of a call."""

    def __init__(self, module: Callable[..., Any], inputs: CallArguments, rounding: float = 0.0) -> None:
        tree, tensors = flatten((inputs.args, inputs.kwargs), CALL)
        self.places = [place for place, tensor in enumerate(tensors) if _is_unpadded_mask(tensor)]
        self._call = CallArguments(
            *rebuild(tree, [_padded(t) if i in self.places else t for i, t in enumerate(tensors)])
        )
        self._rounding = rounding
        self._expected = self._given_by(module) if self.places else None

    def _given_by(self, run: Callable[..., Any]) -> list[torch.Tensor] | None:
        """The outputs; None from what does not take the padding."""
        try:
            with torch.no_grad():
                return flatten(self._call.given_to(run), OUTPUT)[1]
        except Exception:
            return None

    def objection(self, run: Callable[..., Any]) -> str | None:
        """What is wrong with the outputs that another way to run the module gives here."""
        if self._expected is None:
            return None
        given = self._given_by(run)
        if given is None:
            return "It fails on an input with padding."
        return disagreement(self._expected, given, self._rounding)


def _is_unpadded_mask(tensor: torch.Tensor) -> bool:
    """Whether a tensor may be a mask of a batch without padding: integers or booleans that are all one."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.numel() == 0:
        return False
    return tensor.dim() >= 2 and tensor.shape[-1] >= 2 and bool((tensor == 1).all())


def _padded(mask: torch.Tensor) -> torch.Tensor:
    """Zeros at the left of the first row, and at the right of the last; a lone row is padded at the left."""
    padded, width = mask.clone(), max(1, mask.shape[-1] // 3)
    padded[-1, ..., -width:] = 0
    padded[0] = 1
    padded[0, ..., :width] = 0
    return padded
