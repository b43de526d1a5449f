"""OpenVINO, where it is installed: the exported module compiled for its CPU plugin, in float32."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .base import Executor, PreparationFailed, Runner, T, first_line, refuse_training
from .beside import WORTH_A_THREAD, is_worth_waking
from .engine import EnginePlan, plan_for_engine
from .grouped_attention import spell_out_groups
from .ready_outputs import ReadyOutputs, computed_by, readable

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
            session = CompiledSession(plan, _compile(plan))
            plan.check(computed_by(session, plan))
            return RequestRunner(plan, module, session)
        except PreparationFailed:
            raise
        except Exception as error:
            raise PreparationFailed(f"openvino cannot run this module: {first_line(error)}.") from error


class RequestRunner(Runner):
    """Runs on the memory of the caller's tensors and writes into fresh outputs: nothing is copied."""

    def __init__(self, plan: EnginePlan, module: nn.Module, session: CompiledSession) -> None:
        super().__init__(plan.signature, module)
        self.ready = ReadyOutputs(session, plan.outputs)
        if is_worth_waking(lambda: self.run(plan.tensors)):
            self.hides_looks_from = WORTH_A_THREAD

    def run(self, tensors: list[torch.Tensor]) -> Any:
        return self.ready.run(tensors)

    def run_while(
        self, look: Callable[[], T], tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, T]:
        return self.ready.run_while(look, tensors)


class CompiledSession:
    """Requests of a compiled model. (Started in a thread of the engine's, a call takes longer than in the caller's.)"""

    def __init__(self, plan: EnginePlan, compiled: Any) -> None:
        from openvino import Tensor

        if len(compiled.inputs) != len(plan.tensors) or len(compiled.outputs) != len(plan.expected):
            raise PreparationFailed(
                f"openvino made {len(compiled.inputs)} inputs and {len(compiled.outputs)} outputs out of "
                f"{len(plan.tensors)} and {len(plan.expected)}, so they cannot be matched."
            )
        self.request = compiled.create_infer_request
        self._share = Tensor

    def write_into(self, request: Any, results: list[torch.Tensor]) -> None:
        for index, result in enumerate(results):
            request.set_output_tensor(index, self._share(result.numpy(), shared_memory=True))

    def read_from(self, request: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        held = []
        for index, tensor in enumerate(tensors):
            held.append(readable(tensor))
            request.set_input_tensor(index, self._share(held[-1].detach().numpy(), shared_memory=True))
        return held

    def run(self, request: Any) -> None:
        request.infer(share_outputs=True)


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
