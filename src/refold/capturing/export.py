"""torch.export, called so that any model goes in: flat tensors, its own call inside, sizes left open on request."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from typing import Any, Literal

import torch
from torch import nn

from refold.capturing.calling import Calling
from refold.capturing.known_values import KnownValues
from refold.capturing.rebinding import Buffers
from refold.capturing.trees import Branch, Constant, Leaf, Tree, flatten

Openness = Literal["all", "batch", "none"]


@dataclasses.dataclass(frozen=True)
class Exported:
    """An exported program, the shape of its result, and what could not be part of that result."""

    program: torch.export.ExportedProgram
    output: Tree
    left_out: tuple[str, ...]
    prefix: str
    guards: tuple[str, ...]


class Result:
    """What the model gave while it was exported. Held apart: export puts a module's own attributes back."""

    def __init__(self) -> None:
        self.tree: Tree = Constant(None)
        self.left_out: list[str] = []

    def take(self, value: Any) -> tuple[Any, ...]:
        flat: list[Any] = []
        self.left_out = []
        self.tree = flatten(value, flat, left_out=self.left_out)
        return tuple(flat)


class Adapter(nn.Module):
    """Takes flat tensors, calls the model in its own way, gives flat tensors. It exists during export only."""

    def __init__(self, model: nn.Module, calling: Calling, result: Result, values: KnownValues | None = None) -> None:
        super().__init__()
        self.model = model
        self.calling = calling
        self.result = result
        self.values = values
        self.training = model.training

    def forward(self, *leaves: torch.Tensor) -> tuple[Any, ...]:
        with self.values.watching(leaves) if self.values is not None else nullcontext(leaves) as inputs:
            args, kwargs = self.calling.rebuild(inputs)
            buffers = Buffers(self.model)
            return buffers.write_rebound(self.result.take(self.model(*args, **kwargs)))


def export(
    model: nn.Module,
    calling: Calling,
    leaves: Sequence[torch.Tensor],
    shapes: Any,
    values: KnownValues | None = None,
) -> Exported:
    """Export ``model`` as it is called by ``calling``; ``shapes`` holds one torch.export shape per tensor."""
    result = Result()
    adapter = Adapter(model, calling, result, values)
    copies = tuple(leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves)
    # torch writes half-made graphs and warnings to stderr on its own; what matters of them is in the exception
    with redirect_stderr(io.StringIO()), torch.inference_mode(False), torch.enable_grad(), size_one_stays_open():
        program = torch.export.export(adapter, copies, strict=False, dynamic_shapes=(shapes,) if shapes else None)
    guards = tuple(g for g in getattr(program, "_guards_code", ()) if "leaves" in g)
    return Exported(program, result.tree, tuple(result.left_out), "model", guards)


@contextmanager
def size_one_stays_open() -> Iterator[None]:
    """Keep a dimension of size 1 in the example symbolic instead of taking it for a constant."""
    from torch.fx.experimental import _config  # the only door to this switch

    with _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        yield


def open_shapes(leaves: Sequence[torch.Tensor], openness: Openness) -> tuple[Any, ...] | None:
    """One shape per tensor with all, only the first, or no dimension left open.

    Images and videos (floating, four dimensions or more) keep their height and width: most models fix them, and an
    export with open ones takes several times as long. Explicit dynamic shapes open them.
    """
    if openness == "none" or not leaves:
        return None
    auto = torch.export.Dim.AUTO

    def open_dims(leaf: torch.Tensor) -> int:
        return 1 if openness == "batch" or (leaf.is_floating_point() and leaf.dim() >= 4) else leaf.dim()

    return tuple(dict.fromkeys(range(leaf.dim())[: open_dims(leaf)], auto) for leaf in leaves)


def without_dims(shapes: Any, fixed: Collection[Any]) -> Any:
    """The same shapes with some tensors left static."""
    if not shapes or not fixed:
        return shapes
    return tuple(None if i in fixed else shape for i, shape in enumerate(shapes))


def given_shapes(calling: Calling, shapes: Any) -> tuple[Any, ...]:
    """torch.export's ``dynamic_shapes`` of the model's own arguments, as one shape per tensor."""
    by_name = (
        shapes if isinstance(shapes, dict) else dict(zip([a.name for a in calling.arguments], shapes, strict=False))
    )
    found: dict[int, Any] = {}
    for argument in calling.arguments:
        if argument.given:
            _match_shapes(argument.tree, by_name.get(argument.name), found)
    return tuple(found[i] for i in range(len(found)))


def _match_shapes(tree: Tree, shape: Any, found: dict[int, Any]) -> None:
    if isinstance(tree, Leaf):
        found[tree.index] = shape
    if not isinstance(tree, Branch):
        return
    for i, child in enumerate(tree.children):
        key = tree.keys[i] if tree.keys else i
        inner = shape.get(key) if isinstance(shape, dict) else shape[i] if shape else None
        _match_shapes(child, inner, found)
