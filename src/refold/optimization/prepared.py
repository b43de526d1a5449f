"""What was prepared for a model: the calls it is for, and the ways to run them while the model is what it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from refold.call_arguments import CallArguments
from refold.executors import Checked, InputSpec, UnsupportedInput, run_checked
from refold.optimization.decision import Decision
from refold.optimization.inventory import Inventory
from refold.optimization.sizes import Shapes
from refold.optimization.spelling import Spelling
from refold.optimization.watch import Watch
from refold.optimization.zeroed_outputs import ZeroedOutputs
from refold.report.document import Report

_ONE_SIZE = "It was prepared for the sizes of its example alone."
Call = tuple[list[torch.Tensor], tuple[Any, ...], dict[str, Any]]
"""The tensors of a call, and its positional and keyword arguments in the example's spelling."""


@dataclass
class Way:
    """One way to run a model, and whether it still computes what the model does."""

    executor: str
    run: Callable[..., Any]
    watch: Watch
    launches_first: bool = field(init=False)
    """Whether the model is checked while a device computes a call, and not before."""

    def __post_init__(self) -> None:
        self.launches_first = isinstance(self.run, Checked) and self.run.is_asynchronous

    def run_checked(self, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that was checked already. `UnsupportedInput` says why this way cannot stand for the model in this
        call; nothing was done then that can be seen outside."""
        if not self.launches_first:
            _refuse(self.watch.why_changed())
            return run_checked(self.run, tensors, args, kwargs)
        output = run_checked(self.run, tensors, args, kwargs)
        reason = self.watch.why_changed()
        self.launches_first = reason is None  # nothing is computed in vain a second time
        _refuse(reason)
        return output


@dataclass
class Prepared:
    """The ways to run a model, and the calls that they are for: one way for the sizes of the example, one for all other
    sizes that the graph takes."""

    spelling: Spelling
    spec: InputSpec
    graph_module: GraphModule | None
    at_example: Way
    at_any_size: Way | None
    report: Report
    refusal: Callable[[tuple[Any, ...], dict[str, Any]], str | None] | None = None
    """Why the graph does not take a call's sizes, or the values of inputs that control flow depends on."""
    inventory: Inventory | None = None
    """What the model was; None where it was not captured."""
    zeroed: ZeroedOutputs | None = None
    """The outputs that are zeros at padding, also where the original runs."""
    rewrites: tuple[int, ...] = ()
    """The signatures of the transformations that made the graph what it is."""
    decision: Decision | None = None
    """All that was decided, as plain data; None where it cannot be told so."""
    is_for_now: bool = False
    """It was made in a hurry, after a move: the plain graph alone."""
    example: Shapes = field(init=False)

    def __post_init__(self) -> None:
        self.example = self.spec.shapes

    @property
    def ways(self) -> list[Way]:
        """All ways, each once."""
        both = (self.at_example, self.at_any_size)
        return list({id(way): way for way in both if way is not None}.values())

    def is_current(self) -> bool:
        """Whether the model is what it was, as far as a call checks that."""
        return not self.reasons()

    def reasons(self) -> list[str]:
        """Why the model is not what it was, as far as a call checks that; none if it is."""
        found = (way.watch.why_changed() for way in self.ways)
        return list(dict.fromkeys(reason for reason in found if reason is not None))

    def why_not(self, call: CallArguments) -> str | None:
        """Why a call is not one of those that this is for; None if it is."""
        try:
            tensors, args, kwargs = self.checked(call.args, call.kwargs)
        except UnsupportedInput as unsupported:
            return str(unsupported)
        if self.refusal is not None and (reason := self.refusal(args, kwargs)) is not None:
            return reason
        is_own_size = tuple([tensor.shape for tensor in tensors]) == self.example
        return None if is_own_size or self.at_any_size is not None else _ONE_SIZE

    def checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """A call that was found to be one of those that this is for; else `UnsupportedInput` says why not."""
        args, kwargs = self.spelling.of(args, kwargs)
        return self.spec.tensors(args, kwargs), args, kwargs

    def run(self, call: Call) -> Any:
        """Run a call that was checked, by the first way that can."""
        tensors, args, kwargs = call
        if self.refusal is not None:
            _refuse(self.refusal(args, kwargs))
        other = self.at_any_size
        if self.at_example is not other and tuple([tensor.shape for tensor in tensors]) == self.example:
            try:
                return self.at_example.run_checked(tensors, args, kwargs)
            except UnsupportedInput:
                if other is None:
                    raise  # else it may hold copies of weights where the other reads them
        if other is None:
            raise UnsupportedInput(_ONE_SIZE)
        return other.run_checked(tensors, args, kwargs)


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise UnsupportedInput(reason)
