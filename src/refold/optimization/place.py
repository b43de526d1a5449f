"""Where a model lies and in which dtype it computes, so that a call that was given for it can follow it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from refold.call_arguments import CallArguments


@dataclass(frozen=True)
class Place:
    """The device of a model's weights and the dtype of its numbers; None where it has none."""

    device: torch.device | None
    dtype: torch.dtype | None

    @classmethod
    def of(cls, model: nn.Module) -> Place:
        """Where a model is now."""
        weights = [*model.parameters(), *model.buffers()]
        device = next((weight.device for weight in weights), None)
        return cls(device, next((weight.dtype for weight in weights if weight.is_floating_point()), None))

    def carry(self, call: CallArguments, there: Place) -> CallArguments:
        """A call of a model that was here, as the model takes it there: what lay beside the weights follows them, and
        numbers that had their dtype are cast like them."""

        def follow(tensor: torch.Tensor) -> torch.Tensor:
            dtype = there.dtype if tensor.is_floating_point() and tensor.dtype == self.dtype else None
            device = there.device if tensor.device == self.device else None
            return tensor.to(device or tensor.device, dtype or tensor.dtype)

        return call if there == self else call.map(follow)
