"""OpenVINO, where it is installed: the exported module compiled for its CPU plugin, in float32."""

from __future__ import annotations

import importlib.util
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .base import Executor, PreparationFailed, Runner, T, first_line, refuse_training
from .engine import EnginePlan, plan_for_engine
from .grouped_attention import spell_out_groups

_TYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}
)


class OpenVino(Executor):
    name = "openvino"
    follows_weights = False

    def available(self, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"openvino is used on CPU only, not on {device.type}"
        if importlib.util.find_spec("openvino") is None:
            return "openvino is not installed (pip install 'refold[openvino]')"
        return None

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        refuse_training(module)
        plan = plan_for_engine(module, args, kwargs, self.name, _TYPES, open_sizes=False)
        try:
            runner = RequestRunner(plan, module, _compile(plan))
            plan.check(runner.compute(plan.tensors, plan.unwritten()))
        except PreparationFailed:
            raise
        except Exception as error:
            raise PreparationFailed(f"openvino cannot run this module: {first_line(error)}.") from error
        return runner


class RequestRunner(Runner):
    """Runs on the memory of the caller's tensors and writes into fresh outputs: nothing is copied. The engine computes
    in a thread of its own."""

    hides_looks_from = 0

    def __init__(self, plan: EnginePlan, module: nn.Module, compiled: Any) -> None:
        super().__init__(plan.signature, module)
        if len(compiled.inputs) != len(plan.tensors) or len(compiled.outputs) != len(plan.expected):
            raise PreparationFailed(
                f"openvino made {len(compiled.inputs)} inputs and {len(compiled.outputs)} outputs out of "
                f"{len(plan.tensors)} and {len(plan.expected)}, so they cannot be matched."
            )
        self.outputs = plan.outputs
        self.request = compiled.create_infer_request()
        self.lock = threading.Lock()  # a request runs one call at a time

    def run(self, tensors: list[torch.Tensor]) -> Any:
        return self.outputs.build(self.compute(tensors, self.outputs.fresh()), tensors)

    def run_while(
        self, look: Callable[[], T], tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, T]:
        results = self.outputs.fresh()
        with self._launched(tensors, results):
            seen = look()
        return self.outputs.build(results, tensors), seen

    def compute(self, tensors: list[torch.Tensor], results: list[torch.Tensor]) -> list[torch.Tensor]:
        with self._launched(tensors, results):
            return results

    @contextmanager
    def _launched(self, tensors: list[torch.Tensor], results: list[torch.Tensor]) -> Iterator[None]:
        """Inside, the engine computes; at the end, it has."""
        held = [tensor.contiguous().resolve_neg() for tensor in tensors]
        with self.lock:
            for index, tensor in enumerate(held):
                self.request.set_input_tensor(index, _share(tensor))
            for index, tensor in enumerate(results):
                self.request.set_output_tensor(index, _share(tensor))
            self.request.start_async()
            try:
                yield
            finally:
                self.request.wait()


def _share(tensor: torch.Tensor) -> Any:
    import openvino

    return openvino.Tensor(tensor.detach().numpy(), shared_memory=True)


def _compile(plan: EnginePlan) -> Any:
    """Compile for these very shapes. The plugin would take bf16 by itself where the processor has it: f32 is asked for.

    Converting makes every dimension dynamic, hence the `reshape`.
    """
    import openvino

    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = openvino.convert_model(spell_out_groups(plan.exported))
    model.reshape({index: list(tensor.shape) for index, tensor in enumerate(plan.tensors)})
    return openvino.Core().compile_model(model, "CPU", settings)
