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

from refold.capture.exclusive import alone
from refold.errors import PreparationFailed
from refold.executors.exported_engine import EnginePlan, plan_for_engine
from refold.executors.interface import Executor, Runner, refuse_training
from refold.executors.interruptible import interruptibly
from refold.executors.meaning import prepare_engine
from refold.executors.open_axes import OpenAxes
from refold.wording import first_line, quiet

_TYPES = frozenset(
    (
        *(torch.float32, torch.float64, torch.float16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
)


class OnnxRuntime(Executor):
    """`opset=23` keeps attention and RMS norm whole, which helps some models and hinders others. `any_size` builds it
    for all sizes that capture left open, else for those of the example."""

    reads_live_weights = False
    keeps_meaning = True
    hears_interrupts = True

    def __init__(
        self,
        name: str = "onnxruntime",
        *,
        opset: int | None = None,
        any_size: bool = False,
        superseded_by: str | None = None,
    ) -> None:
        self.name = name
        self.superseded_by = superseded_by
        self.opset = opset
        self.takes_any_size = any_size

    def available(self, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"onnxruntime is used on CPU only, not on {device.type}"
        for package in ("onnxruntime", "onnxscript"):
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed (pip install onnxruntime onnxscript)"
        return None

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        refuse_training(module)
        axes = OpenAxes.of(module, args, kwargs).from_size(1) if self.takes_any_size else None
        plan = plan_for_engine(module, args, kwargs, self.name, _TYPES, axes=axes)
        return prepare_engine(self, plan, module, self.build)

    def build(self, plan: EnginePlan, module: nn.Module) -> SessionRunner:
        """Prepare what was exported; whether it means what torch means is another matter."""
        try:
            with tempfile.TemporaryDirectory(prefix="refold-onnx-") as folder:
                session = _session(_export(plan, Path(folder), self.opset))
            runner = SessionRunner(plan, module, session)
            plan.check(runner.compute(plan.tensors))
        except PreparationFailed:
            raise
        except Exception as error:
            raise PreparationFailed(f"onnxruntime cannot run this module: {first_line(error)}.") from error
        return runner


class SessionRunner(Runner):
    """Runs on the memory of the caller's tensors. The engine hands out new arrays: to bind memory of our own would take
    longer."""

    def __init__(self, plan: EnginePlan, module: nn.Module, session: Any) -> None:
        super().__init__(plan.spec, module)
        self.outputs = plan.outputs
        self.compute_arrays = getattr(session, "_sess", session).run  # its own `run` checks the names once more
        names = {node.name for node in session.get_inputs()}
        self.used = [(index, _input_name(index)) for index in range(len(plan.tensors)) if _input_name(index) in names]
        self.made = [_output_name(index) for index in range(len(plan.expected))]

    def run(self, tensors: list[torch.Tensor]) -> Any:
        return self.outputs.build(self.compute(tensors), tensors)

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


def _input_name(index: int) -> str:
    return f"input_{index}"


def _output_name(index: int) -> str:
    return f"output_{index}"


def _export(plan: EnginePlan, folder: Path, opset: int | None) -> Path:
    path = folder / "module.onnx"
    with _silent():
        program = alone(
            lambda: torch.onnx.export(
                plan.exported,
                (),
                dynamo=True,
                verbose=False,
                opset_version=opset,
                input_names=[_input_name(index) for index in range(len(plan.tensors))],
                output_names=[_output_name(index) for index in range(len(plan.expected))],
            )
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
    return interruptibly(lambda: onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]))
