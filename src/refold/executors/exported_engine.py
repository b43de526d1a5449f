"""What an engine outside Python needs: an exported program of tensors only, and how to build the outputs again."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from refold.capture.exclusive import alone
from refold.capture.export_program import size_one_stays_open
from refold.errors import PreparationFailed
from refold.executors.input_spec import InputSpec, example
from refold.executors.interface import run_example
from refold.executors.open_axes import OpenAxes
from refold.nested import OUTPUT, Make, Tree, flatten, rebuild, rebuilder, same_shape
from refold.wording import first_line


@dataclass(frozen=True)
class Outputs:
    """How the outputs of a call are made of what the engine computes.

    `sources` says for each tensor among the outputs which computed one it is, or (negative, counted from −1) which
    input: engines lose track of outputs that are one and the same value, or that are an input.
    """

    tree: Tree
    sources: tuple[int, ...]
    shapes: tuple[tuple[torch.Size, torch.dtype], ...]

    def fresh(self) -> list[torch.Tensor]:
        """New memory at every call: what was returned before is never overwritten."""
        return [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in self.shapes]

    def build(self, computed: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
        return self._assemble([computed[source] if source >= 0 else inputs[-1 - source] for source in self.sources])

    @cached_property
    def _assemble(self) -> Make:
        return rebuilder(self.tree)


@dataclass(frozen=True)
class EnginePlan:
    """An exported program, the example inputs it was made with, and the values it must compute from them."""

    spec: InputSpec
    exported: torch.export.ExportedProgram
    tensors: list[torch.Tensor]
    expected: list[torch.Tensor]
    outputs: Outputs
    inputs: Tree
    is_checked: bool = True
    axes: OpenAxes | None = None
    """The sizes that are open; None where all are those of the example."""

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The example call, with tensors of its own."""
        args, kwargs = rebuild(self.inputs, [tensor.clone() for tensor in self.tensors])
        return args, kwargs

    def unwritten(self) -> list[torch.Tensor]:
        """Output memory for the check: what the engine fails to write stays NaN."""
        kinds = [(value, torch.nan if value.is_floating_point() else 1) for value in self.expected]
        return [torch.full(value.shape, fill, dtype=value.dtype) for value, fill in kinds]

    def check(self, computed: list[torch.Tensor]) -> None:
        """Refuse an engine whose outputs are mixed up or missing; how exact they are is for `verify` to say."""
        sentence = disagreement(self.expected, computed) if self.is_checked else None
        if sentence is not None:
            raise PreparationFailed(sentence)


def plan_for_engine(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    engine: str,
    types: frozenset[torch.dtype] | None = None,
    *,
    sizes_of_values: bool = True,
    axes: OpenAxes | None = None,
) -> EnginePlan:
    """Export the module for an engine that knows these types, with these sizes open; `sizes_of_values` says that the
    engine can give outputs whose size depends on values."""
    spec, inputs, tensors = example(args, kwargs, open_sizes=axes is not None)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree, outputs = flatten(run_example(module, inputs, tensors), OUTPUT)
        if types is not None:
            _refuse_types([*tensors, *outputs], engine, types)
        sources, kept = _sources(outputs, tensors)
        if not kept or not tensors:
            raise PreparationFailed(f"{engine} has nothing to compute: no tensor goes in, or none comes out.")
        flat = FlatModule(module, inputs, kept)
        exported = _export(flat, tensors if axes is None else axes.told_apart(tensors), engine, axes)
    traced, values = flat.traced.output
    # in a trace, a number that is computed from values has no value yet
    if not same_shape(tree, traced, same_classes=True):
        raise PreparationFailed(f"{engine} gives tensors only, and the module computes another output from values.")
    if not sizes_of_values and not all(map(_has_known_shape, values)):
        raise PreparationFailed(f"{engine} is built for fixed sizes, and the size of an output depends on values.")
    expected = [outputs[index].detach().clone() for index in kept]
    shapes = tuple((value.shape, value.dtype) for value in expected)
    return EnginePlan(spec, exported, tensors, expected, Outputs(tree, sources, shapes), inputs, axes=axes)


def _has_known_shape(value: torch.Tensor) -> bool:
    """Whether the sizes of a traced value follow from those of the inputs."""
    return all(isinstance(size, int) or size.node.hint is not None for size in value.shape)


class FlatModule(nn.Module):
    """A module that takes tensors and returns those at the indices `kept`: what an engine outside Python can be fed."""

    def __init__(self, module: nn.Module, inputs: Tree, kept: tuple[int, ...]) -> None:
        super().__init__()
        self.module = module
        self.inputs = inputs
        self.kept = kept
        self.traced = Traced()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = rebuild(self.inputs, tensors)
        self.traced.output = flatten(self.module(*args, **kwargs), OUTPUT)
        outputs = self.traced.output[1]
        return tuple(outputs[index] for index in self.kept)


class Traced:
    """Holds all that a module gave when it was called last."""

    output: tuple[Tree, list[torch.Tensor]]


def _export(
    flat: FlatModule, tensors: list[torch.Tensor], engine: str, axes: OpenAxes | None
) -> torch.export.ExportedProgram:
    shapes = None if axes is None else (axes.exported_shapes(len(tensors)),)
    try:
        # torch writes half-made graphs to stderr on its own; what matters of them is in the exception
        with redirect_stderr(io.StringIO()), nullcontext() if axes is None else size_one_stays_open():
            exported = alone(
                lambda: torch.export.export(flat, tuple(tensors), strict=False, dynamic_shapes=shapes),
            )
    except Exception as error:
        raise PreparationFailed(f"{engine} needs torch.export, which failed: {first_line(error)}.") from error
    if axes is not None:
        _check_open(exported, axes)
    return exported


def _check_open(exported: torch.export.ExportedProgram, axes: OpenAxes) -> None:
    """Refuse an export that fixed a size, or took two that vary by themselves for one."""
    wanted = set(exported.graph_signature.user_inputs)
    values = [node.meta["val"] for node in exported.graph.find_nodes(op="placeholder") if node.name in wanted]
    symbols = [{str(values[index].shape[dim]) for index, dim in axis.places} for axis in axes.axes]
    if any(symbol.isdigit() for names in symbols for symbol in names):
        raise PreparationFailed("The export fixed a size that capture left open.")
    if len(set().union(*symbols)) != sum(map(len, symbols)):
        raise PreparationFailed("The export took two sizes for one that may differ.")


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


def disagreement(
    expected: Sequence[torch.Tensor], computed: Sequence[torch.Tensor], rounding: float = 0.0
) -> str | None:
    """Where outputs are mixed up, missing, or not numbers where those of the module are; None if they agree.

    Half of the digits must agree: the relative error is at most √ε, where ε is the rounding of the outputs or, if that
    is coarser, of what they are computed from. What is not rounded must be the same.
    """
    if len(expected) != len(computed):
        return f"It gives {len(computed)} outputs, and the module {len(expected)}."
    for index, (mine, its) in enumerate(zip(expected, computed, strict=True)):
        if mine.shape != its.shape or mine.dtype != its.dtype:
            return f"Output {index} is of another shape or type than the module's."
        if not mine.is_floating_point() and not mine.is_complex():
            if not torch.equal(mine, its):
                return f"It computes something else than the module in output {index}."
            continue
        finite = torch.isfinite(mine)
        if not torch.equal(finite, torch.isfinite(its)):
            return f"It has NaN or infinity elsewhere in output {index} than the module."
        one, other = _wide(mine[finite]), _wide(its[finite])
        most = one.abs().max() if one.numel() else 1.0  # squares of large numbers overflow
        scale = most if most > 0 else 1.0
        error = torch.linalg.vector_norm((other - one) / scale)
        if error > max(torch.finfo(mine.dtype).eps, rounding) ** 0.5 * torch.linalg.vector_norm(one / scale):
            return f"It computes something else than the module in output {index}."
    return None


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)
