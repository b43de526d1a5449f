"""Ways to run a module, behind one interface; which one is the fastest is for measuring to say."""

from .base import (
    Checked,
    Executor,
    PreparationFailed,
    Runner,
    UnknownExecutor,
    UnsupportedInput,
    executor_named,
    executors,
    run_checked,
    unavailable,
)
from .compiled import Compile, Freeze
from .cuda_graph import CudaGraph
from .onnx_runtime import OnnxRuntime
from .openvino import OpenVino
from .plain import Plain
from .signature import Signature

__all__ = [
    "Checked",
    "Compile",
    "CudaGraph",
    "Executor",
    "Freeze",
    "OnnxRuntime",
    "OpenVino",
    "Plain",
    "PreparationFailed",
    "Runner",
    "Signature",
    "UnknownExecutor",
    "UnsupportedInput",
    "executor_named",
    "executors",
    "run_checked",
    "unavailable",
]
