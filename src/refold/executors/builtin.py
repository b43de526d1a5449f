"""The executors that come with Refold, in the order in which they are tried."""

from __future__ import annotations

from .base import Executor
from .compiled import Compile, Freeze
from .cuda_graph import CudaGraph
from .fused_kernels import with_fused_kernels
from .onnx_runtime import OnnxRuntime
from .openvino import OpenVino
from .plain import Plain

_AUTOTUNE = Compile("compile-autotune", device="cuda", mode="max-autotune-no-cudagraphs")

# Those that are quick to prepare and often win come first: a time budget may not last for all.
BUILT_IN: tuple[Executor, ...] = (
    Plain(),
    CudaGraph(),
    OnnxRuntime(),
    OpenVino(),
    CudaGraph("compile+cuda_graph", inner=Compile("compile")),
    CudaGraph("compile-fused+cuda_graph", inner=Compile("compile-fused", device="cuda", lower=with_fused_kernels)),
    Freeze("compile-freezing", device="cpu"),
    Compile("compile", superseded_by="compile-freezing"),
    CudaGraph("compile-freezing+cuda_graph", inner=Freeze("compile-freezing"), superseded_by="compile+cuda_graph"),
    CudaGraph("compile-autotune+cuda_graph", inner=_AUTOTUNE),
    Freeze("compile-freezing-autotune", device="cpu", options={"max_autotune": True}),
    OnnxRuntime("onnxruntime-opset23", opset=23),
    _AUTOTUNE,
    Compile("compile-reduce-overhead", device="cuda", mode="reduce-overhead"),
)
