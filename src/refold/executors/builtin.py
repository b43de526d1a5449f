"""The executors that come with Refold, in the order in which they are tried."""

from __future__ import annotations

from .base import Executor
from .compiled import Compile, Freeze
from .cuda_graph import CudaGraph
from .onnx_runtime import OnnxRuntime
from .openvino import OpenVino
from .plain import Plain

_AUTOTUNE = "max-autotune-no-cudagraphs"

BUILT_IN: tuple[Executor, ...] = (
    Plain(),
    CudaGraph(),
    Compile("compile"),
    Freeze("compile-freezing", device="cpu"),
    Freeze("compile-freezing-autotune", device="cpu", options={"max_autotune": True}),
    CudaGraph("compile+cuda-graph", inner=Compile("compile")),
    Compile("compile-autotune", device="cuda", mode=_AUTOTUNE),
    CudaGraph("compile-autotune+cuda-graph", inner=Compile("compile-autotune", device="cuda", mode=_AUTOTUNE)),
    Compile("compile-reduce-overhead", device="cuda", mode="reduce-overhead"),
    OnnxRuntime(),
    OpenVino(),
)
