"""What a user would pick by hand to make a model faster, each as a callable built from the eager model."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor
from suite import Inputs
from torch import nn

Contender = Callable[..., Any]
Builder = Callable[[nn.Module, Inputs], Contender]
COMPILE = "torch.compile"


def keep_eager(model: nn.Module, inputs: Inputs) -> Contender:
    return model


def compiled(mode: str | None = None, *, dynamic: bool | None = None, **options: Any) -> Builder:
    """`torch.compile` of a copy; options go to inductor and, since dynamo reads one of them, to its configuration."""

    def build(model: nn.Module, inputs: Inputs) -> Contender:
        chosen = copy.deepcopy(model)
        # torch.compile takes a mode or options, not both
        settings = torch._inductor.list_mode_options(mode) | options if mode and options else dict(options)
        with inductor.patch(**options):
            result = _compile(chosen, settings, mode, dynamic)
            result(**inputs)
        return result

    return build


def _compile(model: nn.Module, settings: dict[str, Any], mode: str | None, dynamic: bool | None) -> Contender:
    if settings:
        return torch.compile(model, options=settings, dynamic=dynamic)
    return torch.compile(model, mode=mode, dynamic=dynamic)


def fx_optimization(model: nn.Module, inputs: Inputs) -> Contender:
    """What torch.fx itself ships: batch norms folded, dropout removed, blocked layouts on CPU.

    Its tracer takes none of these models, so it is fed with Refold's captured graph.
    """
    from torch.fx.experimental import optimization

    from refold.capture.tracing import trace

    captured = trace(copy.deepcopy(model), **inputs)
    folded = optimization.fuse(captured)
    return folded if _device(inputs) == "cuda" else optimization.optimize_for_inference(folded)


def onnx_runtime(model: nn.Module, inputs: Inputs) -> Contender:
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        program = torch.onnx.export(model, (), kwargs=inputs, dynamo=True, verbose=False)
        program.save(str(path), external_data=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]

    def call(**inputs: torch.Tensor) -> list[Any]:
        return session.run(None, {name: inputs[name].numpy() for name in names})

    return call


def openvino(model: nn.Module, inputs: Inputs) -> Contender:
    import openvino as ov

    converted = ov.convert_model(torch.export.export(model, (), inputs, strict=False))
    converted.reshape({index: list(value.shape) for index, value in enumerate(inputs.values())})
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    engine = ov.Core().compile_model(converted, "CPU", settings | {"PERFORMANCE_HINT": "LATENCY"})

    def call(**inputs: torch.Tensor) -> list[Any]:
        result = engine([value.numpy() for value in inputs.values()], share_inputs=True)
        return [result[index] for index in range(len(engine.outputs))]

    return call


def refold_optimize(model: nn.Module, inputs: Inputs) -> Contender:
    from refold.optimization.job_stages import optimize

    return optimize(copy.deepcopy(model), inputs, progress=False, cache=False)


def contenders(device: str) -> dict[str, Builder]:
    """All contenders of a device by name. Those whose name begins with `torch.compile` are its modes.

    On a CPU two modes make the very code of the default one: there are no CUDA graphs for reduce-overhead to record,
    and max-autotune has other matrix kernels to choose from only where weights are constants (with freezing).
    """
    shared: dict[str, Builder] = {
        "eager": keep_eager,
        COMPILE: compiled(),
        f"{COMPILE} freezing": compiled(freezing=True),
        "torch.fx optimization": fx_optimization,
    }
    if device == "cuda":
        shared[f"{COMPILE} reduce-overhead"] = compiled("reduce-overhead")
        shared[f"{COMPILE} max-autotune"] = compiled("max-autotune")
        shared[f"{COMPILE} reduce-overhead freezing"] = compiled("reduce-overhead", freezing=True)
    else:
        shared[f"{COMPILE} max-autotune freezing"] = compiled("max-autotune", freezing=True)
        shared |= {"onnxruntime": onnx_runtime, "openvino": openvino}
    return shared | {"refold": refold_optimize}


def build(name: str, builder: Builder, model: nn.Module, inputs: Inputs) -> Contender:
    """Build a contender and call it once, without its chatter."""
    for chatty in ("torch.onnx", "onnxscript"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    with torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        made = builder(model, inputs)
        made(**inputs)
    return made


def _device(inputs: Inputs) -> str:
    return next(iter(inputs.values())).device.type
