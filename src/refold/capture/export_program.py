"""torch.export, called so that any model goes in: flat tensors, its own call inside, sizes left open on request."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as fx_config

from refold.capture.forward_call import ForwardCall
from refold.capture.guard_lines import note_lines
from refold.capture.known_values import KnownValues
from refold.errors import CaptureError
from refold.fx_private import join_path
from refold.nested import RESULT, Branch, Constant, Leaf, Tree, flatten

PREFIX = "model."  # before the names of parameters and modules in an exported program


@dataclasses.dataclass(frozen=True)
class Exported:
    """An exported program, the structure of its result, and what could not be part of that result."""

    program: torch.export.ExportedProgram
    output: Tree
    left_out: tuple[str, ...]


class _ExportResult:
    """What the model gave while it was exported. Held apart: export puts a module's own attributes back."""

    def __init__(self) -> None:
        self.tree: Tree = Constant(None)
        self.left_out: list[str] = []

    def take(self, value: Any) -> tuple[Any, ...]:
        self.left_out = []
        self.tree, flat = flatten(value, RESULT, self.left_out)
        return tuple(flat)


class _FlatModel(nn.Module):
    """Takes flat tensors, calls the model in its own way, gives flat tensors. It exists during export only."""

    def __init__(self, model: nn.Module, call: ForwardCall, result: _ExportResult, values: KnownValues | None) -> None:
        super().__init__()
        self.model = model
        self.call = call
        self.result = result
        self.values = values
        self.training = model.training

    def forward(self, *leaves: torch.Tensor) -> tuple[Any, ...]:
        with self.values.watching(leaves) if self.values is not None else nullcontext(leaves) as inputs:
            note_lines(leaves)
            args, kwargs = self.call.rebuild(inputs)
            before = [(path, m, dict(m._buffers)) for path, m in self.model.named_modules() if "_buffers" in vars(m)]
            return _write_rebound(before, self.result.take(self.model(*args, **kwargs)))


def export(
    model: nn.Module,
    call: ForwardCall,
    leaves: Sequence[torch.Tensor],
    shapes: Any,
    values: KnownValues | None,
) -> Exported:
    """Export ``model`` as ``call`` says; ``shapes`` holds one torch.export shape per tensor."""
    result = _ExportResult()
    flat = _FlatModel(model, call, result, values)
    copies = tuple(leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves)
    # weights that were made in inference mode can only be set to require gradients there, which export does
    mode = torch.inference_mode(any(p.is_inference() and p.requires_grad for p in model.parameters()))
    # torch writes half-made graphs and warnings to stderr on its own; what matters of them is in the exception
    with redirect_stderr(io.StringIO()), mode, torch.enable_grad(), size_one_stays_open():
        program = torch.export.export(flat, copies, strict=False, dynamic_shapes=(shapes,) if shapes else None)
    return Exported(program, result.tree, tuple(result.left_out))


def size_one_stays_open() -> AbstractContextManager[Any]:
    """Inside, an export does not take an open size of one for a constant."""
    return fx_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]


def is_image(leaf: torch.Tensor) -> bool:
    """Whether an input may be images or videos: numbers in four dimensions or more."""
    return leaf.is_floating_point() and leaf.dim() >= 4


def open_shapes(
    leaves: Sequence[torch.Tensor], batch_only: bool = False, images: bool = False
) -> tuple[Any, ...] | None:
    """One shape per tensor with all dimensions, or only the first, left open.

    Images keep their height and width unless `images` opens them: most models fix them, and an export with open ones
    takes several times as long.
    """

    def open_dims(leaf: torch.Tensor) -> range:
        return range(leaf.dim())[: 1 if batch_only or (is_image(leaf) and not images) else None]

    return tuple(dict.fromkeys(open_dims(leaf), torch.export.Dim.AUTO) for leaf in leaves) or None


def given_shapes(call: ForwardCall, shapes: Any) -> tuple[Any, ...]:
    """torch.export's ``dynamic_shapes`` of the model's own arguments, as one shape per tensor."""
    names = [argument.name for argument in call.arguments]
    by_name = shapes if isinstance(shapes, dict) else dict(zip(names, shapes, strict=False))
    found: dict[int, Any] = {}
    for argument in call.arguments:
        if argument.given:
            _match_shapes(argument.tree, by_name.get(argument.name), found)
    return tuple(found[i] for i in range(len(found)))


def _match_shapes(tree: Tree, shape: Any, found: dict[int, Any]) -> None:
    if isinstance(tree, Leaf):
        found[tree.index] = shape
    for i, (key, child) in enumerate(tree.items() if isinstance(tree, Branch) else ()):
        inner = shape.get(key) if isinstance(shape, dict) else shape[i] if shape else None
        _match_shapes(child, inner, found)


@contextmanager
def skip_no_op_casts(model: nn.Module) -> Iterator[None]:
    """Inside, ``module.to(...)`` does nothing where nothing is to be done, since an export cannot follow it."""
    modules = [m for m in model.modules() if "to" not in vars(m)]
    for module in modules:
        vars(module)["to"] = partial(_to_where_needed, module)
    try:
        yield
    finally:
        for module in modules:
            vars(module).pop("to", None)


def _to_where_needed(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    wanted = [*args, *kwargs.values()]
    tensors = [*module.parameters(), *module.buffers()]
    if all(_is_so(value, tensors) for value in wanted if value is not None):
        return module
    return type(module).to(module, *args, **kwargs)


def _is_so(value: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether all tensors have this dtype or device already; False for anything else."""
    if isinstance(value, torch.dtype):
        return all(t.dtype == value for t in tensors if t.is_floating_point())
    if isinstance(value, (torch.device, str)):
        return all(t.device == torch.device(value) for t in tensors)
    return False


def _write_rebound(before: Sequence[tuple[str, nn.Module, dict[str, Any]]], outputs: Sequence[Any]) -> tuple[Any, ...]:
    """Write the tensors that buffers are bound to into the buffers that were there ``before`` a call, by module.

    Returns the outputs, with copies of those that the writes would change.
    """
    rebound = [
        (join_path(path, name), module, name, old)
        for path, module, buffers in before
        for name, old in buffers.items()
        if old is not None and module._buffers.get(name) is not old
    ]
    written = {_memory(old) for *_, old in rebound}
    outputs = tuple(_apart(value, written) for value in outputs)
    values = [_apart(module._buffers.get(name), written) for _, module, name, _ in rebound]
    for (path, module, name, old), new in zip(rebound, values, strict=True):
        if new is None or new.shape != old.shape or new.dtype != old.dtype:
            raise CaptureError(f"its forward gives the buffer {path} another size or dtype, which a graph cannot")
        old.copy_(new)
        module._buffers[name] = old
    return outputs


def _apart(value: Any, written: set[int]) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and _memory(value) in written else value


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def hide_export(_model: nn.Module) -> Iterator[None]:
    """Inside, `torch.compiler.is_exporting` gives False to all code but torch's: models then run as in a call."""
    is_exporting = torch.compiler.is_exporting

    def answer() -> bool:
        asking = sys._getframe(1).f_globals.get("__name__", "")
        return asking.partition(".")[0] == "torch" and is_exporting()

    torch.compiler.is_exporting = answer
    try:
        yield
    finally:
        torch.compiler.is_exporting = is_exporting


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Inside, torch's attention modules run their Python code, not the fused kernels."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
