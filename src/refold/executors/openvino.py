"""OpenVINO, where it is installed: the exported module compiled for its CPU plugin, in float32."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from refold.errors import PreparationFailed
from refold.executors.exported_engine import EnginePlan, plan_for_engine
from refold.executors.interface import Executor, Runner, refuse_training
from refold.executors.interruptible import interruptibly
from refold.executors.meaning import prepare_engine
from refold.executors.open_axes import OpenAxes
from refold.wording import first_line

_TYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}
)


class OpenVino(Executor):
    """`any_size` builds it for all sizes that capture left open, else for those of the example."""

    reads_live_weights = False
    keeps_meaning = True
    hears_interrupts = True

    def __init__(self, name: str = "openvino", *, any_size: bool = False) -> None:
        self.name = name
        self.takes_any_size = any_size

    def available(self, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"openvino is used on CPU only, not on {device.type}"
        if importlib.util.find_spec("openvino") is None:
            return "openvino is not installed (pip install openvino)"
        return None

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        refuse_training(module)
        axes = OpenAxes.of(module, args, kwargs).from_size(1) if self.takes_any_size else None
        plan = plan_for_engine(module, args, kwargs, self.name, _TYPES, sizes_of_values=False, axes=axes)
        return prepare_engine(self, plan, module, self.build)

    def build(self, plan: EnginePlan, module: nn.Module) -> RequestRunner:
        """Prepare what was exported; whether it means what torch means is another matter."""
        try:
            runner = RequestRunner(plan, module, _compile(plan))
            plan.check(runner.compute(plan.tensors, plan.unwritten()))
            return runner
        except PreparationFailed:
            raise
        except Exception as error:
            raise PreparationFailed(f"openvino cannot run this module: {first_line(error)}.") from error


class RequestRunner(Runner):
    """Runs on the memory of the caller's tensors and writes into fresh outputs: nothing is copied. (Started in a thread
    of the engine's, a call takes longer than in the caller's.)"""

    def __init__(self, plan: EnginePlan, module: nn.Module, compiled: Any) -> None:
        from openvino import Tensor

        if len(compiled.inputs) != len(plan.tensors) or len(compiled.outputs) != len(plan.expected):
            raise PreparationFailed(
                f"openvino made {len(compiled.inputs)} inputs and {len(compiled.outputs)} outputs out of "
                f"{len(plan.tensors)} and {len(plan.expected)}, so they cannot be matched."
            )
        super().__init__(plan.spec, module)
        self._outputs, self._share = plan.outputs, Tensor
        self._is_open = plan.axes is not None
        # it computes some 64-bit integers as 32-bit ones, also where they are a result
        names = [output.element_type.get_type_name() for output in compiled.outputs]
        self._other_types = [
            index
            for index, (name, value) in enumerate(zip(names, plan.expected, strict=True))
            if name == "i32" and value.dtype == torch.int64
        ]
        self._dtypes = [value.dtype for value in plan.expected]
        self._new_request = compiled.create_infer_request
        self._idle: list[Any] = []  # a request runs one call at a time, and calls may come from many threads

    def run(self, tensors: list[torch.Tensor]) -> Any:
        results = [] if self._is_open else self._outputs.fresh()
        return self._outputs.build(self.compute(tensors, results), tensors)

    def compute(self, tensors: list[torch.Tensor], results: list[torch.Tensor]) -> list[torch.Tensor]:
        """Write what is computed from tensors into others; these. Where sizes are open, none are ready, and what the
        engine made is copied: it writes there again."""
        try:
            request = self._idle.pop()
        except IndexError:
            request = self._new_request()
        readable = [tensor.detach().contiguous().resolve_neg() for tensor in tensors]
        for index, tensor in enumerate(readable):
            request.set_input_tensor(index, self._share(tensor.numpy(), shared_memory=True))
        for index, result in enumerate(results):
            if index not in self._other_types and not self._is_open:
                request.set_output_tensor(index, self._share(result.numpy(), shared_memory=True))
        request.infer(share_outputs=True)
        if self._is_open:
            results = [self._copied(request, index) for index in range(len(self._dtypes))]
        for index in self._other_types if not self._is_open else ():
            results[index].copy_(torch.from_numpy(request.get_output_tensor(index).data))
        self._idle.append(request)  # not one that failed
        return results

    def _copied(self, request: Any, index: int) -> torch.Tensor:
        made = torch.from_numpy(request.get_output_tensor(index).data)
        return made.to(self._dtypes[index], copy=True)


def _compile(plan: EnginePlan) -> Any:
    """Compile for these very shapes, but for sizes that are open. The plugin would take bf16 by itself where the
    processor has it: it is set to f32.

    Converting makes every dimension dynamic, hence the `reshape`. `openvino.convert_model` would do the same, and
    tell its makers of each conversion, by processes that it starts and files in the user's home.
    """
    import openvino
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }
    shapes = [list(tensor.shape) for tensor in plan.tensors]
    for index, dim in () if plan.axes is None else plan.axes.places():
        shapes[index][dim] = -1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _root_logger_unused():
            decoder = TorchFXPythonDecoder.from_exported_program(spell_out_groups(plan.exported))

        def compiled() -> Any:
            frontend = FrontEndManager().load_by_framework("pytorch")
            model = frontend.convert(frontend.load(decoder))
            model.reshape(dict(enumerate(shapes)))
            return openvino.Core().compile_model(model, "CPU", settings)

        return interruptibly(compiled)


@contextmanager
def _root_logger_unused() -> Iterator[None]:
    """What OpenVINO misses in torch's tables it logs inside, with tracebacks, to the root logger, which would be set up
    to write to stderr by that. Nobody who optimizes a model can do anything about it."""
    root, nowhere = logging.getLogger(), logging.NullHandler()

    def is_others(record: logging.LogRecord) -> bool:
        return "openvino" not in record.pathname

    root.addHandler(nowhere)
    root.addFilter(is_others)
    try:
        yield
    finally:
        root.removeFilter(is_others)
        root.removeHandler(nowhere)


_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def spell_out_groups(exported: ExportedProgram) -> ExportedProgram:
    """The same program with key and value heads repeated wherever attention shares them."""
    if not any(_is_grouped(node) for node in exported.graph.nodes):
        return exported
    return exported.run_decompositions({_ATTENTION: _attend_with_repeated_heads})


def _is_grouped(node: torch.fx.Node) -> bool:
    return node.target is _ATTENTION and bool(node.kwargs.get("enable_gqa", False))


def _attend_with_repeated_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if not enable_gqa:
        return NotImplemented  # leave the operator as it is
    heads = query.shape[-3]
    key, value = _repeat(key, heads), _repeat(value, heads)
    return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


def _repeat(heads_last: torch.Tensor, heads: int) -> torch.Tensor:
    """(…, groups, length, width) → (…, heads, length, width), each group standing for its neighbours."""
    *front, groups, length, width = heads_last.shape
    wide = heads_last.unsqueeze(-3).expand(*front, groups, heads // groups, length, width)
    return wide.reshape(*front, heads, length, width)
