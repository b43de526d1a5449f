"""Outputs that are ready before they are computed: an engine writes into them, and nothing is left to do after it.

What Python does around an engine is slow beyond its instructions, since after a call none of it is in the processor's
caches: to make two tensors and the object that holds them takes longer than to launch the engine. So the outputs of a
call are made while the call before it computes, by the thread that is awake then to look at the model, and bound to the
session by their addresses. One set of outputs is kept; a call that finds none makes its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .agreement import disagreement
from .engine import EnginePlan

_MOST_BYTES = 2**20  # larger memory comes from the system anew, page by page, and takes longer to write


class Ready(NamedTuple):
    """Memory for the outputs of one call, bound to the session."""

    binding: Any
    results: list[torch.Tensor]
    output: Any
    """What the call returns; None where inputs are among it."""


class ReadyOutputs:
    """Makes outputs ready and has them computed. One thread may make them while others compute."""

    def __init__(self, plan: EnginePlan, session: Any, used: list[tuple[int, str]], made: list[str]) -> None:
        """For a session that takes the tensors `used`, by their names, and gives the outputs `made`."""
        from onnxruntime.capi import onnxruntime_pybind11_state as native

        self._outputs = plan.outputs
        self._session, self._native = session._sess, native
        self._run = self._session.run_with_iobinding
        self._device = native.OrtDevice(native.OrtDevice.cpu(), native.OrtDevice.default_memory(), 0)
        self._inputs = [(index, name, *_kind(plan.tensors[index])) for index, name in used]
        self._made = [(name, *_kind(value)) for name, value in zip(made, plan.expected, strict=True)]
        self._waiting: list[Ready] = []
        self._idle: list[Any] = []

    def take(self) -> Ready:
        """Outputs for one call."""
        try:
            return self._waiting.pop()
        except IndexError:
            return self._bound()

    def make(self) -> None:
        """Make outputs ready for the next call that takes some."""
        if not self._waiting:
            self._waiting.append(self._bound())

    def feed(self, ready: Ready, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Let a call read these tensors. Copies that had to be made of some must live until it is computed."""
        copies = []
        bind, device = ready.binding.bind_input, self._device
        for index, name, kind, shape in self._inputs:
            tensor = tensors[index]
            if not tensor.is_contiguous() or tensor.is_neg():
                tensor = tensor.contiguous().resolve_neg()
                copies.append(tensor)
            bind(name, device, kind, shape, tensor.data_ptr())
        return copies

    def compute(self, ready: Ready, tensors: list[torch.Tensor]) -> Any:
        """Run a call that was fed with these tensors; what it returns."""
        self._run(ready.binding, None)
        self._idle.append(ready.binding)
        return self._outputs.build(ready.results, tensors) if ready.output is None else ready.output

    def _bound(self) -> Ready:
        results = self._outputs.fresh()
        try:
            binding = self._idle.pop()
        except IndexError:
            binding = self._native.SessionIOBinding(self._session)
        for (name, kind, shape), result in zip(self._made, results, strict=True):
            binding.bind_output(name, self._device, kind, shape, result.data_ptr())
        return Ready(binding, results, self._outputs.build(results, []) if self._outputs.are_as_computed else None)


def ready_outputs(plan: EnginePlan, session: Any, used: list[tuple[int, str]], made: list[str]) -> ReadyOutputs | None:
    """What makes outputs ready for a session; None where they are large, where it cannot be known before a call how
    large, or where this version of the engine does not take them so."""
    if not plan.has_fixed_sizes or any(tensor.numel() == 0 for tensor in (*plan.tensors, *plan.expected)):
        return None
    if sum(tensor.nbytes for tensor in plan.expected) > _MOST_BYTES:
        return None
    try:
        outputs = ReadyOutputs(plan, session, used, made)
        ready = outputs.take()
        for result, unwritten in zip(ready.results, plan.unwritten(), strict=True):
            result.copy_(unwritten)
        outputs.feed(ready, plan.tensors)
        outputs.compute(ready, plan.tensors)
    except Exception:  # names of its own that another version may not have
        return None
    return outputs if disagreement(plan.expected, ready.results) is None else None


def _kind(tensor: torch.Tensor) -> tuple[type, list[int]]:
    """The type of a tensor's entries as numpy knows it, and the shape."""
    return tensor.new_empty(0).numpy().dtype.type, list(tensor.shape)
