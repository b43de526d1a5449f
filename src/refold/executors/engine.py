"""What an engine outside Python needs: an exported program of tensors only, and how to build the outputs again."""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from .agreement import disagreement
from .assembly import Make, assembler
from .base import PreparationFailed, first_line, run_example
from .signature import Signature, example
from .tree import FlatModule, Layout


@dataclass(frozen=True)
class Outputs:
    """How the outputs of a call are made of what the engine computes.

    `sources` says for each tensor among the outputs which computed one it is, or (negative, counted from −1) which
    input: engines lose track of outputs that are one and the same value, or that are an input.
    """

    layout: Layout
    sources: tuple[int, ...]
    shapes: tuple[tuple[torch.Size, torch.dtype], ...]

    def fresh(self) -> list[torch.Tensor]:
        """New memory at every call: what was returned before is never overwritten."""
        return [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in self.shapes]

    @property
    def nbytes(self) -> int:
        """How much memory is written in a call."""
        return sum(shape.numel() * dtype.itemsize for shape, dtype in self.shapes)

    def build(self, computed: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
        if not self.are_as_computed:
            computed = [computed[source] if source >= 0 else inputs[-1 - source] for source in self.sources]
        return self._assemble(computed)

    @cached_property
    def are_as_computed(self) -> bool:
        """Whether they are what the engine computes, in its order."""
        return self.sources == tuple(range(len(self.sources)))

    @cached_property
    def _assemble(self) -> Make:
        return assembler(self.layout)


@dataclass(frozen=True)
class EnginePlan:
    """An exported program, the example inputs it was made with, and the values it must compute from them."""

    signature: Signature
    exported: torch.export.ExportedProgram
    tensors: list[torch.Tensor]
    expected: list[torch.Tensor]
    outputs: Outputs
    has_fixed_sizes: bool
    """Whether no output has a size that depends on values."""

    def unwritten(self) -> list[torch.Tensor]:
        """Output memory for the check: what the engine fails to write stays NaN."""
        return [torch.full_like(value, torch.nan if value.is_floating_point() else 1) for value in self.expected]

    def check(self, computed: list[torch.Tensor]) -> None:
        """Refuse an engine whose outputs are mixed up or missing; how exact they are is for `verify` to say."""
        sentence = disagreement(self.expected, computed)
        if sentence is not None:
            raise PreparationFailed(sentence)


def plan_for_engine(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    engine: str,
    types: frozenset[torch.dtype],
    *,
    open_sizes: bool,
) -> EnginePlan:
    """Export the module for an engine that knows these types; `open_sizes` says that the engine can give outputs whose
    size depends on values."""
    signature, inputs, tensors = example(args, kwargs)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layout, outputs = Layout.of_output(run_example(module, inputs, tensors))
        _refuse_types([*tensors, *outputs], engine, types)
        sources, kept = _sources(outputs, tensors)
        if not kept or not tensors:
            raise PreparationFailed(f"{engine} has nothing to compute: no tensor goes in, or none comes out.")
        flat = FlatModule(module, inputs, kept)
        try:
            # torch writes half-made graphs to stderr on its own; what matters of them is in the exception
            with redirect_stderr(io.StringIO()):
                exported = torch.export.export(flat, tuple(tensors), strict=False)
        except Exception as error:
            raise PreparationFailed(f"{engine} needs torch.export, which failed: {first_line(error)}.") from error
    traced, values = flat.traced.output
    if not layout.same_constants(traced):  # in a trace, a number that is computed from values has no value yet
        raise PreparationFailed(f"{engine} gives tensors only, and the module computes another output from values.")
    has_fixed_sizes = all(isinstance(size, int) for value in values for size in value.shape)
    if not open_sizes and not has_fixed_sizes:
        raise PreparationFailed(f"{engine} is built for fixed sizes, and the size of an output depends on values.")
    expected = [outputs[index].detach().clone() for index in kept]
    shapes = tuple((value.shape, value.dtype) for value in expected)
    return EnginePlan(signature, exported, tensors, expected, Outputs(layout, sources, shapes), has_fixed_sizes)


def _sources(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where each output comes from, and which outputs an engine has to compute: each value once, and no input."""
    sources: list[int] = []
    kept: list[int] = []
    known = {id(tensor): -1 - index for index, tensor in enumerate(inputs)}
    for index, output in enumerate(outputs):
        if id(output) not in known:
            known[id(output)] = len(kept)
            kept.append(index)
        sources.append(known[id(output)])
    return tuple(sources), tuple(kept)


def _refuse_types(tensors: list[torch.Tensor], engine: str, types: frozenset[torch.dtype]) -> None:
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            kind = str(tensor.layout).removeprefix("torch.")
            raise PreparationFailed(f"{engine} takes no tensor of layout {kind}.")
        if tensor.dtype not in types or tensor.device.type != "cpu":
            raise PreparationFailed(f"{engine} takes no {tensor.dtype} tensor on {tensor.device}.")
