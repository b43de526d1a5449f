"""Ways to run a module, behind one interface; which one is the fastest is for measuring to say."""

from refold.errors import PreparationFailed, UnknownExecutor, UnsupportedInput
from refold.executors.catalogue import executor_named, executors, unavailable
from refold.executors.cuda_graph import CudaGraph
from refold.executors.input_spec import InputSpec
from refold.executors.interface import Checked, Executor, Runner, run_checked
from refold.executors.onnx_runtime import OnnxRuntime
from refold.executors.openvino import OpenVino
from refold.executors.plain import Plain
from refold.executors.torch_compile import Compile, Freeze

__all__ = [
    "Checked",
    "Compile",
    "CudaGraph",
    "Executor",
    "Freeze",
    "InputSpec",
    "OnnxRuntime",
    "OpenVino",
    "Plain",
    "PreparationFailed",
    "Runner",
    "UnknownExecutor",
    "UnsupportedInput",
    "executor_named",
    "executors",
    "run_checked",
    "unavailable",
]
