"""A captured CUDA graph for each input shape: one launch replays all kernels, at no cost in Python.

What a user must know: inputs are copied into fixed buffers and outputs are copied out of them (a clone of each, so the
result of a call is never overwritten by the next; `clone_outputs=False` hands out the buffers themselves). Weights are
read from where they lay at capture: changes in place are followed, a replaced parameter is not.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from .. import fx_private
from .assembly import assembler
from .base import Checked, Executor, PreparationFailed, T, first_line, refuse_training, run_example
from .plain import Plain
from .signature import Signature, UnsupportedInput, example, refuse_gradients
from .tree import Layout

_WARM_UP_CALLS = 3
_FIRST = 0  # the number of the graph that an executor captures when it prepares


class CudaGraph(Executor):
    """Captures what `inner` prepares. `new_shapes` says what a call with another shape does:

    "raise" `UnsupportedInput`; "capture" a graph for it, forgetting the one not used for longest beyond `max_shapes`;
    or run it "eager", through the module itself.
    """

    def __init__(
        self,
        name: str = "cuda_graph",
        *,
        inner: Executor | None = None,
        max_shapes: int = 8,
        new_shapes: Literal["raise", "capture", "eager"] = "raise",
        clone_outputs: bool = True,
        superseded_by: str | None = None,
    ) -> None:
        self.name = name
        self.inner = inner or Plain()
        self.max_shapes = max_shapes
        self.new_shapes = new_shapes
        self.clone_outputs = clone_outputs
        self.superseded_by = superseded_by

    @property
    def follows_weights(self) -> bool:  # type: ignore[override]
        return self.inner.follows_weights

    @property
    def takes_minutes(self) -> bool:  # type: ignore[override]
        return self.inner.takes_minutes

    def available(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"a CUDA graph needs a CUDA device, not {device.type}"
        return self.inner.available(device)

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        refuse_training(module)
        return GraphRunner(self, module, args, kwargs)


class GraphRunner(Checked):
    """Finds the graph of a call's signature; where there is none, the executor's settings say what to do."""

    hides_looks_from = 0

    def __init__(self, executor: CudaGraph, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.executor = executor
        self.module = module
        self.graphs: OrderedDict[int, CapturedGraph] = OrderedDict()
        self._numbers = itertools.count(_FIRST)
        # One pool for all shapes: outputs are copied out before the next replay can use the same memory.
        self.pool = torch.cuda.graph_pool_handle() if executor.clone_outputs else None
        self.lock = threading.Lock()
        self.turn = Turn()
        self.signature = self.capture(args, kwargs).signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            graph, tensors = self._find(args, kwargs)
            if graph is not None:
                return graph.compute(tensors)
        return self.module(*args, **kwargs)

    def run_checked(self, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.lock:
            first = self.graphs.get(_FIRST)
            if first is not None:  # not forgotten for others
                self.graphs.move_to_end(_FIRST)
                return first.compute(tensors)
        return self(*args, **kwargs)

    def run_while(
        self, look: Callable[[], T], tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, T]:
        return self.run_checked(tensors, args, kwargs), look()  # the device computes, and nobody waits for it here

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CapturedGraph | None, list[torch.Tensor]]:
        """The graph for this call, the latest used first, and the call's tensors."""
        problem = UnsupportedInput("No graph was captured.")
        for key, graph in reversed(self.graphs.items()):
            try:
                tensors = graph.signature.tensors(args, kwargs)
            except UnsupportedInput as error:
                problem = error
                continue
            self.graphs.move_to_end(key)
            return graph, tensors
        if self.executor.new_shapes == "raise":
            raise problem
        if self.executor.new_shapes == "eager":
            return None, []
        graph = self.capture(args, kwargs)
        return graph, graph.signature.tensors(args, kwargs)

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedGraph:
        """Capture a graph for inputs like these and remember it."""
        signature, layout, tensors = example(args, kwargs)
        graph = CapturedGraph(self, signature, layout, tensors)
        self.graphs[next(self._numbers)] = graph
        while len(self.graphs) > self.executor.max_shapes:
            self.graphs.popitem(last=False)
        return graph


class Turn:
    """Lets calls from different streams use the same buffers one after the other."""

    def __init__(self) -> None:
        self.stream: tuple[int, int] | None = None
        self.done = torch.cuda.Event()

    def begin(self, device: int) -> None:
        stream = (device, fx_private.raw_stream(device))
        if self.stream is not None and stream != self.stream:
            torch.cuda.current_stream().wait_event(self.done)
        self.stream = stream

    def end(self) -> None:
        self.done.record()


class CapturedGraph:
    """One captured graph with its input buffers. `tensors` (copies that nobody else holds) become the buffers."""

    def __init__(self, owner: GraphRunner, signature: Signature, layout: Layout, tensors: list[torch.Tensor]) -> None:
        _refuse_host_tensors(tensors, "takes")
        self.signature = signature
        # Kept alive here: the graph reads their memory, whoever else lets go of them.
        self.weights = [*owner.module.parameters(), *owner.module.buffers()]
        self.buffers = tensors
        self.clone_outputs = owner.executor.clone_outputs
        self.turn = owner.turn
        self.device = tensors[0].get_device()
        self.graph = torch.cuda.CUDAGraph()
        args, kwargs = layout.fill(tensors)
        with torch.cuda.device(self.device), torch.no_grad():
            run_example(owner.module, layout, tensors)
            self.call = owner.executor.inner.prepare(owner.module, args, kwargs)
            made, self.outputs = Layout.of_output(self._record(args, kwargs, owner))
        self.assemble = assembler(made)
        _refuse_host_tensors(self.outputs, "returns")

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any], owner: GraphRunner) -> Any:
        stream = _capture_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP_CALLS):  # compiles, autotunes, and fills the workspaces of the libraries
                    self.call(*args, **kwargs)
            torch.cuda.current_stream().wait_stream(stream)
            # thread_local: what other threads do on the device meanwhile must not spoil the capture
            with (
                _own_workspaces(),
                torch.cuda.graph(self.graph, pool=owner.pool, stream=stream, capture_error_mode="thread_local"),
            ):
                return self.call(*args, **kwargs)
        except Exception as error:
            raise PreparationFailed(f"No CUDA graph can be captured of this module: {first_line(error)}.") from error

    def compute(self, tensors: list[torch.Tensor]) -> Any:
        """Copy the inputs in, replay, copy the outputs out, on the caller's stream. The device is idle until the replay
        is launched, so what can wait comes after it."""
        refuse_gradients(tensors, self.weights)
        if torch.cuda.current_device() == self.device:
            return self.assemble(self._replay(tensors))
        with torch.cuda.device(self.device):
            return self.assemble(self._replay(tensors))

    def _replay(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        self.turn.begin(self.device)
        _copy(tensors, self.buffers)
        self.graph.replay()
        outputs = self.outputs
        if self.clone_outputs:
            outputs = [torch.empty_like(output) for output in self.outputs]
            _copy(self.outputs, outputs)
        self.turn.end()
        return outputs


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    """Several tensors of a kind are copied by one kernel."""
    if len(sources) == 1:
        targets[0].copy_(sources[0], non_blocking=True)
    else:
        torch._foreach_copy_(targets, sources, non_blocking=True)


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Let cuBLAS make its workspaces anew inside, and forget them afterwards. A workspace that was there before may be
    given up by others while the graph still writes into it (inductor does so for its own graphs); one that is made
    during the capture lies in the graph's own memory, and must not be used by anybody else."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    torch.cuda.synchronize()
    if clear is not None:
        clear()
    try:
        yield
    finally:
        if clear is not None:
            clear()


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _refuse_host_tensors(tensors: list[torch.Tensor], verb: str) -> None:
    """A replay computes nothing on the host: a tensor there would keep the value it had at capture."""
    for tensor in tensors:
        if not tensor.is_cuda:
            raise PreparationFailed(
                f"The module {verb} a tensor on {tensor.device}; a CUDA graph needs all on the GPU."
            )
    if not tensors:
        raise PreparationFailed(f"The module {verb} no tensor, so there is nothing to capture.")
