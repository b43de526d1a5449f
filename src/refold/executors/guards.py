"""What the inputs of a call must be like for an engine to give what torch gives; a call that is not takes torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from refold.executors.input_spec import InputSpec, refuse_gradients
from refold.executors.interface import Checked, run_checked
from refold.executors.open_axes import OpenAxes

Open = Literal["some", "first", "all"]


@dataclass(frozen=True)
class Bounds:
    """All numbers of an input lie between two; NaN lies nowhere."""

    place: int
    low: float
    high: float

    def allow(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor keeps to them. (Comparing the ends as Python numbers takes less time than in torch.)"""
        if tensor.numel() == 0:
            return True
        low, high = tensor.detach().aminmax()
        return self.low <= low.item() and high.item() <= self.high


@dataclass(frozen=True)
class OpenMask:
    """In every row of a mask, some position, the first one, or all are open (not zero)."""

    place: int
    positions: Open

    def allow(self, tensor: torch.Tensor) -> bool:
        """Whether a mask has them open."""
        if tensor.numel() == 0 or self.positions == "all":
            return bool(tensor.all())
        opened = tensor.select(-1, 0) if self.positions == "first" else tensor.any(-1)
        return bool(opened.all())


Guard = tuple[Bounds | OpenMask, ...]


def allows(guard: Guard, tensors: list[torch.Tensor]) -> bool:
    """Whether the inputs of a call are all that they must be. It runs at every call."""
    return all(condition.allow(tensors[condition.place]) for condition in guard)


class Guarded(Checked):
    """Runs what was prepared where the guard allows the inputs, and open sizes lie within their bounds; the module in
    torch where not."""

    def __init__(
        self,
        guard: Guard,
        spec: InputSpec,
        run: Callable[..., Any],
        module: Callable[..., Any],
        axes: OpenAxes | None = None,
    ) -> None:
        self.spec, self.guard, self.run, self.module, self.axes = spec, guard, run, module, axes
        self.is_asynchronous = isinstance(run, Checked) and run.is_asynchronous
        self.weights = [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = self.spec.tensors(args, kwargs)
        if self._takes(tensors):
            return self.run(*args, **kwargs)
        refuse_gradients(tensors, self.weights)
        with torch.no_grad():
            return self.module(*args, **kwargs)

    def run_checked(self, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._takes(tensors):
            return run_checked(self.run, tensors, args, kwargs)
        return run_checked(self.module, tensors, args, kwargs)

    def _takes(self, tensors: list[torch.Tensor]) -> bool:
        return (self.axes is None or self.axes.hold(tensors)) and allows(self.guard, tensors)
