"""Outputs that are ready before they are computed: an engine writes into them, and nothing is left to do after it.

What Python does around an engine is slow beyond its instructions, since after a call none of it is in the processor's
caches: to make two tensors and the object that holds them takes longer than to launch the engine. So the outputs of a
call are made while the call before it computes, by the thread that is awake then to look at the model. One set of
outputs is kept; a call that finds none makes its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from .base import T
from .beside import ask_beside
from .engine import EnginePlan, Outputs

_MOST_BYTES = 2**20  # larger memory comes from the system anew, page by page, and takes longer to write


class Session(Protocol):
    """An engine that reads and writes memory where it is pointed at. It computes in the thread of its caller, leaves
    Python to others meanwhile, and has no effect but its outputs."""

    def request(self) -> Any:
        """Something that runs one call at a time."""

    def write_into(self, request: Any, results: list[torch.Tensor]) -> None:
        """Let a request write its outputs there."""

    def read_from(self, request: Any, tensors: list[torch.Tensor]) -> Any:
        """Let a request read its inputs there; what must live until it has run."""

    def run(self, request: Any) -> None:
        """Compute, from where it reads to where it writes."""


class _Ready(NamedTuple):
    """A request that has memory for its outputs."""

    request: Any
    results: list[torch.Tensor]
    output: Any
    """What the call returns; None where inputs are among it."""


class ReadyOutputs:
    """Runs calls of a session. One thread may make outputs ready while others run calls."""

    def __init__(self, session: Session, outputs: Outputs) -> None:
        self._session, self._outputs = session, outputs
        self._waiting: list[_Ready] = []
        self._idle: list[Any] = []
        self._next = self.make if can_be_ready(outputs) else None

    def run(self, tensors: list[torch.Tensor]) -> Any:
        """Run a call with these tensors; what it returns."""
        ready = self._take()
        held = self._session.read_from(ready.request, tensors)
        return self._computed(ready, tensors, held)

    def run_while(self, look: Callable[[], T], tensors: list[torch.Tensor]) -> tuple[Any, T]:
        """Run a call while another thread looks at something: what the call returns, and what was seen."""
        ready = self._take()
        held = self._session.read_from(ready.request, tensors)
        # at the last moment: a thread that is woken while Python is held has to be woken again
        question = ask_beside(look, self._next)
        return self._computed(ready, tensors, held), question.answer()

    def make(self) -> None:
        """Make outputs ready for the next call."""
        if not self._waiting:
            self._waiting.append(self._made())

    def _take(self) -> _Ready:
        try:
            return self._waiting.pop()
        except IndexError:
            return self._made()

    def _made(self) -> _Ready:
        results = self._outputs.fresh()
        try:
            request = self._idle.pop()
        except IndexError:
            request = self._session.request()
        self._session.write_into(request, results)
        return _Ready(request, results, self._outputs.build(results, []) if self._outputs.are_as_computed else None)

    def _computed(self, ready: _Ready, tensors: list[torch.Tensor], held: Any) -> Any:
        self._session.run(ready.request)
        self._idle.append(ready.request)  # not one that failed
        return self._outputs.build(ready.results, tensors) if ready.output is None else ready.output


def can_be_ready(outputs: Outputs) -> bool:
    """Whether it is quicker to make outputs before a call than in it."""
    return outputs.nbytes <= _MOST_BYTES


def computed_by(session: Session, plan: EnginePlan) -> list[torch.Tensor]:
    """What a session computes from the example; what it fails to write is not a number."""
    request, results = session.request(), plan.unwritten()
    session.write_into(request, results)
    held = session.read_from(request, plan.tensors)
    session.run(request)
    del held
    return results


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the same values whose memory can be read as it lies."""
    return tensor.contiguous().resolve_neg() if not tensor.is_contiguous() or tensor.is_neg() else tensor
