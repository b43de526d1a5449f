"""A second example, where the first one has a mask of ones: the same inputs with padding.

A mask is all ones in most examples and not in most batches, and where it is zero engines go their own ways: what a
model leaves finite for a query that may look at nothing, another attention kernel turns into NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from refold.executors import Plain, Signature, run_checked
from refold.executors.agreement import disagreement
from refold.executors.base import Checked
from refold.executors.tree import Layout, tensors_of
from refold.optimizing.calls import Inputs, split


class PaddedExample:
    """What a module gives for the padded example; `places` are those of the masks among the tensors of a call."""

    def __init__(self, module: nn.Module, inputs: Inputs) -> None:
        layout, tensors = Layout.of(split(inputs))
        self.module = module
        self.places = [place for place, tensor in enumerate(tensors) if _may_be_padded(tensor)]
        self._call = layout.fill([_padded(t) if i in self.places else t for i, t in enumerate(tensors)])
        self._expected = self._given_by(module) if self.places else None

    def _given_by(self, run: Callable[..., Any]) -> list[torch.Tensor] | None:
        """The outputs; None from what does not take the padding."""
        args, kwargs = self._call
        try:
            with torch.no_grad():
                return tensors_of(run(*args, **kwargs))
        except Exception:
            return None

    def objection(self, run: Callable[..., Any]) -> str | None:
        """What is wrong with the outputs that another way to run the module gives here."""
        if self._expected is None:
            return None
        given = self._given_by(run)
        return "It fails on an input with padding." if given is None else disagreement(self._expected, given)

    def left_to_the_module(self, run: Callable[..., Any], why: str) -> ForMasksOfOnes:
        """That way for masks of ones, and the module for all others."""
        args, kwargs = self._call
        return ForMasksOfOnes(
            Signature.of(args, kwargs), self.places, run, Plain().prepare(self.module, args, kwargs), why
        )


@dataclass(frozen=True)
class ForMasksOfOnes(Checked):
    """Runs a call one way where the tensors at these places are all ones, and another way where not."""

    signature: Signature
    places: list[int]
    run: Callable[..., Any]
    otherwise: Callable[..., Any]
    why: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run_checked(self.signature.tensors(args, kwargs), args, kwargs)

    def run_checked(self, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self.run if are_ones([tensors[place] for place in self.places]) else self.otherwise
        return run_checked(run, tensors, args, kwargs)

    def __str__(self) -> str:
        return f"Calls with padding run as a plain graph, since the engine differs there: {self.why}"


def are_ones(tensors: list[torch.Tensor]) -> bool:
    """Whether every element of all of them is one."""
    if any(tensor.is_cuda for tensor in tensors) and torch.cuda.is_current_stream_capturing():
        return False  # a stream that is being captured must not wait
    return all(bool((tensor == 1).all()) for tensor in tensors)


def _may_be_padded(tensor: torch.Tensor) -> bool:
    is_counted = not tensor.is_floating_point() and not tensor.is_complex()
    return is_counted and tensor.dim() >= 2 and tensor.shape[-1] >= 2 and tensor.numel() > 0 and are_ones([tensor])


def _padded(mask: torch.Tensor) -> torch.Tensor:
    """Zeros at the left of the first row, and at the right of the last; a lone row is padded at the left."""
    padded, width = mask.clone(), max(1, mask.shape[-1] // 3)
    padded[-1, ..., -width:] = 0
    padded[0] = 1
    padded[0, ..., :width] = 0
    return padded
