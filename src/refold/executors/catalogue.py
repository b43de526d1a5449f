"""All executors by name: those that come with Refold, in the order in which they are tried, and those of others."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

import torch

from refold.entry_points import Problem, Unusable, load_offered
from refold.errors import UnknownExecutor
from refold.executors.cuda_graph import CudaGraph
from refold.executors.fused_kernels import with_fused_kernels
from refold.executors.interface import Executor
from refold.executors.onednn_linear import OneDnnLinears
from refold.executors.onnx_runtime import OnnxRuntime
from refold.executors.openvino import OpenVino
from refold.executors.packed_cuda_graph import PackedCudaGraph
from refold.executors.plain import Plain
from refold.executors.sized_cuda_graphs import SizedCudaGraphs
from refold.executors.torch_compile import Compile, CompileOnce, Freeze
from refold.wording import first_line

_AUTOTUNE = Compile("compile-autotune", device="cuda", mode="max-autotune-no-cudagraphs")

# Those that are quick to prepare and often win come first: a time budget may not last for all.
BUILT_IN: tuple[Executor, ...] = (
    Plain(),
    OneDnnLinears(),
    PackedCudaGraph(),
    SizedCudaGraphs(),
    CudaGraph(),
    OpenVino("openvino-open", any_size=True),
    OpenVino(),
    OnnxRuntime("onnxruntime-open", any_size=True),
    OnnxRuntime(superseded_by="onnxruntime-open"),
    CudaGraph("compile+cuda_graph", inner=Compile("compile")),
    CudaGraph("compile-fused+cuda_graph", inner=Compile("compile-fused", device="cuda", lower=with_fused_kernels)),
    Freeze("compile-freezing", device="cpu"),
    CompileOnce("compile-open"),
    Compile("compile", superseded_by="compile-freezing"),
    CudaGraph("compile-freezing+cuda_graph", inner=Freeze("compile-freezing"), superseded_by="compile+cuda_graph"),
    CudaGraph("compile-autotune+cuda_graph", inner=_AUTOTUNE),
    Freeze("compile-freezing-autotune", device="cpu", options={"max_autotune": True}),
    OnnxRuntime("onnxruntime-opset23", opset=23),
    _AUTOTUNE,
    Compile("compile-reduce-overhead", device="cuda", mode="reduce-overhead"),
)

ENTRY_POINT_GROUP = "refold.executors"


def executors(device: torch.device | str | None = None) -> dict[str, Executor]:
    """All executors by name, built-in ones first; with a device, only those that are available on it."""
    found, _ = _all()
    if device is None:
        return found
    place = torch.device(device)
    return {name: executor for name, executor in found.items() if why_unavailable(executor, place) is None}


def executor_named(name: str) -> Executor:
    """The executor of that name; a name that does not exist is refused with the names that do."""
    found, left_out = _all()
    if name not in found:
        broken = [str(problem) for problem in left_out if problem.name == name]
        known = f"There are: {', '.join(found)}."
        raise UnknownExecutor(" ".join([f"There is no executor called {name!r}.", known, *broken]))
    return found[name]


def problems() -> tuple[Problem, ...]:
    """The executors of other packages that could not be used, each with the reason."""
    return _all()[1]


def unavailable(device: torch.device | str) -> dict[str, str]:
    """The executors that cannot be used on this device, each with the reason."""
    place = torch.device(device)
    reasons = {name: why_unavailable(executor, place) for name, executor in executors().items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def why_unavailable(executor: Executor, place: torch.device) -> str | None:
    """Why an executor cannot be used on a device; None if it can."""
    try:
        return executor.available(place)
    except Exception as error:  # another package's code may raise anything
        return f"it fails to say whether it is available: {first_line(error)}"


def _all() -> tuple[dict[str, Executor], tuple[Problem, ...]]:
    """Every executor by name, built-in ones first, and what had to be left out."""
    found = {executor.name: executor for executor in BUILT_IN}
    left_out = []
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        made = load_offered(entry, lambda entry: _load(entry, found))
        if isinstance(made, Problem):
            left_out.append(made)
        else:
            found[made.name] = made
    return found, tuple(left_out)


def _load(entry: EntryPoint, taken: dict[str, Executor]) -> Executor:
    made = entry.load()
    executor = made() if isinstance(made, type) else made
    if not isinstance(executor, Executor):
        raise Unusable(f"{entry.value} is no refold.executors.Executor")
    if executor.name in taken:
        raise Unusable(f"its name {executor.name!r} is taken already, by {type(taken[executor.name]).__name__}")
    return executor
