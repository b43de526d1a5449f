"""A captured CUDA graph for each input shape: one launch replays all kernels, at no cost in Python.

Inputs are copied into fixed buffers and outputs are copied out of them, so that a result is never overwritten by the
next call. Weights are read from where they lay at capture: changes in place are seen, a replaced parameter is not.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.fx import GraphModule

from refold import fx_private
from refold.errors import PreparationFailed
from refold.executors.input_spec import InputSpec, example, refuse_gradients
from refold.executors.interface import Checked, Executor, refuse_training, run_example
from refold.executors.plain import Plain
from refold.executors.recorded_sizes import RecordedSizes
from refold.nested import OUTPUT, Tree, flatten, rebuild, rebuilder
from refold.patterns.packing.token_operators import OPERATORS
from refold.wording import first_line

_ASKS_THE_MASK = OPERATORS.token_plan.default
_WARM_UP_CALLS = 3
_SHARE_OF_MEMORY = 0.05  # of the device, for all graphs of one model


class CudaGraph(Executor):
    """Captures what `inner` prepares. `new_shapes`: a call with another shape is to "raise" `UnsupportedInput`,
    or "capture" a graph for it when it comes for the n-th time (`sightings`; `inner` must take any size where that is
    not the first), and beyond `max_shapes` drop the one that was not used for longest."""

    def __init__(
        self,
        name: str = "cuda_graph",
        *,
        inner: Executor | None = None,
        max_shapes: int = 8,
        new_shapes: Literal["raise", "capture"] = "raise",
        sightings: int = 1,
        superseded_by: str | None = None,
    ) -> None:
        self.name = name
        self.inner = inner or Plain()
        self.max_shapes = max_shapes
        self.new_shapes = new_shapes
        self.sightings = sightings
        self.superseded_by = superseded_by

    @property
    def reads_live_weights(self) -> bool:  # type: ignore[override]
        return self.inner.reads_live_weights

    @property
    def keeps_meaning(self) -> bool:  # type: ignore[override]
        return self.inner.keeps_meaning

    @property
    def hears_interrupts(self) -> bool:  # type: ignore[override]
        return self.inner.hears_interrupts

    @property
    def takes_minutes(self) -> bool:  # type: ignore[override]
        return self.inner.takes_minutes

    def available(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"a CUDA graph needs a CUDA device, not {device.type}"
        return self.inner.available(device)

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        refuse_training(module)
        if isinstance(module, GraphModule) and any(n.target is _ASKS_THE_MASK for n in module.graph.nodes):
            raise PreparationFailed(
                "The graph asks the mask of each call for its tokens, and a replay cannot wait for it."
            )
        return GraphRunner(self, module, args, kwargs)


class GraphRunner(Checked):
    """Replays the graph that was captured for the sizes of a call. Where there is none, what it is captured of runs."""

    is_asynchronous = True

    def __init__(self, executor: CudaGraph, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.executor = executor
        self.module = module
        self.graphs: RecordedSizes[CapturedGraph] = RecordedSizes(executor.max_shapes, executor.sightings)
        # One pool for all shapes: outputs are copied out before the next replay can use the same memory.
        self.pool = torch.cuda.graph_pool_handle()
        self.lock = threading.Lock()
        self.turn = Turn()
        self.spec = InputSpec.of(args, kwargs, open_sizes=executor.new_shapes == "capture")
        first = CapturedGraph(self, *example(args, kwargs)[1:])
        self.graphs.add(_sizes(self.spec.tensors(args, kwargs)), first)
        self.direct = first.call
        self.most_memory = _SHARE_OF_MEMORY * torch.cuda.get_device_properties(first.device).total_memory

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run_checked(self.spec.tensors(args, kwargs), args, kwargs)

    def run_checked(self, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._run(tensors, args, kwargs)
        except torch.OutOfMemoryError:
            with self.lock:
                given_back = self.graphs.forget_all()
            if not given_back:
                raise
        torch.cuda.empty_cache()
        return self.direct(*args, **kwargs)

    def _run(self, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.lock:
            try:
                graph = self.graphs.find(_sizes(tensors), lambda: self._capture(args, kwargs))
            except PreparationFailed:
                graph = None
            if graph is not None:
                return graph.compute(tensors)
        return self.direct(*args, **kwargs)

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedGraph:
        graph, held = CapturedGraph(self, *example(args, kwargs)[1:]), self.graphs.recordings.values()
        while held and graph.memory + sum(other.memory for other in held) > self.most_memory:
            self.graphs.forget_oldest()
        return graph


def _sizes(tensors: list[torch.Tensor]) -> tuple[torch.Size, ...]:
    return tuple([tensor.shape for tensor in tensors])


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
    """One captured graph with its input buffers. `tensors` (copies that are held here only) become the buffers."""

    def __init__(self, owner: GraphRunner, tree: Tree, tensors: list[torch.Tensor]) -> None:
        _refuse_host_tensors(tensors, "takes")
        # Kept alive here: the graph reads their memory, also if the module is gone.
        self.weights = [*owner.module.parameters(), *owner.module.buffers()]
        self.buffers = tensors
        self.turn = owner.turn
        self.device = tensors[0].get_device()
        self.graph = torch.cuda.CUDAGraph()
        args, kwargs = rebuild(tree, tensors)
        before = torch.cuda.memory_reserved(self.device)
        with torch.cuda.device(self.device), torch.no_grad():
            run_example(owner.module, tree, tensors)
            self.call = owner.executor.inner.prepare(owner.module, args, kwargs)
            made, self.outputs = flatten(self._record(args, kwargs, owner), OUTPUT)
        self.memory = max(0, torch.cuda.memory_reserved(self.device) - before)
        self.assemble = rebuilder(made)
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
        except torch.OutOfMemoryError:
            raise
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
    during the capture lies in the graph's own memory, and must not be used by anything else."""
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
