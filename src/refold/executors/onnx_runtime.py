"""ONNX Runtime, where it is installed: the module exported to ONNX and run by its CPU kernels."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..quiet import quiet
from .agreement import disagreement
from .base import Executor, PreparationFailed, Runner, T, first_line, refuse_training
from .beside import WORTH_A_THREAD, ask_beside, is_worth_waking
from .engine import EnginePlan, plan_for_engine
from .ready_outputs import ReadyOutputs, can_be_ready, computed_by, readable

_TYPES = frozenset(
    (
        *(torch.float32, torch.float64, torch.float16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
)


class OnnxRuntime(Executor):
    """`opset=23` keeps attention and RMS norm whole, which helps some models and hinders others."""

    follows_weights = False

    def __init__(self, name: str = "onnxruntime", *, opset: int | None = None) -> None:
        self.name = name
        self.opset = opset

    def available(self, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"onnxruntime is used on CPU only, not on {device.type}"
        for package in ("onnxruntime", "onnxscript"):
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed (pip install 'refold[onnxruntime]')"
        return None

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        refuse_training(module)
        plan = plan_for_engine(module, args, kwargs, self.name, _TYPES, open_sizes=True)
        try:
            with tempfile.TemporaryDirectory(prefix="refold-onnx-") as folder:
                session = _session(_export(plan, Path(folder), self.opset))
            runner = SessionRunner(plan, module, session)
            plan.check(runner.compute(plan.tensors))
            runner.use_spare_core(plan, session)
        except PreparationFailed:
            raise
        except Exception as error:
            raise PreparationFailed(f"onnxruntime cannot run this module: {first_line(error)}.") from error
        return runner


class SessionRunner(Runner):
    """Runs on the memory of the caller's tensors. Where nothing is made ready for it, the engine hands out new arrays:
    to bind memory of our own then would take longer."""

    def __init__(self, plan: EnginePlan, module: nn.Module, session: Any) -> None:
        super().__init__(plan.signature, module)
        self.outputs = plan.outputs
        self.compute_arrays = getattr(session, "_sess", session).run  # its own `run` looks at the names once more
        names = {node.name for node in session.get_inputs()}
        self.used = [(index, _input_name(index)) for index in range(len(plan.tensors)) if _input_name(index) in names]
        self.made = [_output_name(index) for index in range(len(plan.expected))]
        self.ready: ReadyOutputs | None = None

    def use_spare_core(self, plan: EnginePlan, session: Any) -> None:
        """Let another thread look at the model and make outputs ready, if it has a core, and the time."""
        if not is_worth_waking(lambda: self.compute(plan.tensors)):
            return
        self.hides_looks_from = WORTH_A_THREAD
        has_memory = all(tensor.numel() > 0 for tensor in (*plan.tensors, *plan.expected))
        if not (plan.has_fixed_sizes and has_memory and can_be_ready(plan.outputs)):
            return
        try:
            bound = BoundSession(plan, session, self.used, self.made)
            agrees = disagreement(plan.expected, computed_by(bound, plan)) is None
        except Exception:  # names of its own that another version may not have
            return
        if agrees:
            self.ready = ReadyOutputs(bound, plan.outputs)

    def run(self, tensors: list[torch.Tensor]) -> Any:
        return self.outputs.build(self.compute(tensors), tensors)

    def run_while(
        self, look: Callable[[], T], tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, T]:
        if self.ready is not None:
            return self.ready.run_while(look, tensors)
        feeds = self._feeds(tensors)
        question = ask_beside(look)
        computed = list(map(torch.from_numpy, self.compute_arrays(self.made, feeds, None)))
        return self.outputs.build(computed, tensors), question.answer()

    def compute(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(map(torch.from_numpy, self.compute_arrays(self.made, self._feeds(tensors), None)))

    def _feeds(self, tensors: list[torch.Tensor]) -> dict[str, Any]:
        feeds = {}
        for index, name in self.used:
            try:
                feeds[name] = tensors[index].numpy()
            except RuntimeError:  # it requires gradients, or is to be negated when it is read
                feeds[name] = tensors[index].detach().resolve_neg().numpy()
        return feeds


class BoundSession:
    """A session that is bound to memory by its address."""

    def __init__(self, plan: EnginePlan, session: Any, used: list[tuple[int, str]], made: list[str]) -> None:
        from onnxruntime.capi import onnxruntime_pybind11_state as native

        self._session = session._sess
        self._new, self._run = native.SessionIOBinding, self._session.run_with_iobinding
        self._device = native.OrtDevice(native.OrtDevice.cpu(), native.OrtDevice.default_memory(), 0)
        self._used = [(index, name, *_kind(plan.tensors[index])) for index, name in used]
        self._made = [(name, *_kind(value)) for name, value in zip(made, plan.expected, strict=True)]

    def request(self) -> Any:
        return self._new(self._session)

    def write_into(self, request: Any, results: list[torch.Tensor]) -> None:
        for (name, kind, shape), result in zip(self._made, results, strict=True):
            request.bind_output(name, self._device, kind, shape, result.data_ptr())

    def read_from(self, request: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        held = []
        for index, name, kind, shape in self._used:
            tensor = readable(tensors[index])
            held.append(tensor)
            request.bind_input(name, self._device, kind, shape, tensor.data_ptr())
        return held

    def run(self, request: Any) -> None:
        self._run(request, None)


def _kind(tensor: torch.Tensor) -> tuple[type, list[int]]:
    """The type of a tensor's entries as numpy knows it, and the shape."""
    return tensor.new_empty(0).numpy().dtype.type, list(tensor.shape)


def _input_name(index: int) -> str:
    return f"input_{index}"


def _output_name(index: int) -> str:
    return f"output_{index}"


def _export(plan: EnginePlan, folder: Path, opset: int | None) -> Path:
    path = folder / "module.onnx"
    with _silent():
        program = torch.onnx.export(
            plan.exported,
            (),
            dynamo=True,
            verbose=False,
            opset_version=opset,
            input_names=[_input_name(index) for index in range(len(plan.tensors))],
            output_names=[_output_name(index) for index in range(len(plan.expected))],
        )
        assert program is not None
        program.save(str(path), external_data=True)
    return path


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """The exporter talks on stdout, in warnings and in its logs; the library does not."""
    logs = quiet("torch.onnx", "onnxscript", "onnx_ir")
    with logs, contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what it logs as an error, it also raises
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
