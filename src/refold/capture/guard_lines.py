"""Conditions on sizes that an export relied on, each with the line of the model that made it necessary."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._guards import ShapeGuard, SLoc, detect_fake_mode

from refold.capture.failure import model_line

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


class _Guards(list[ShapeGuard]):
    """The guards of an export. torch notes where in its own sources one was made; here the model's line is noted."""

    def append(self, guard: ShapeGuard) -> None:
        stack = traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False)
        where = SLoc(guard.sloc.framework_loc, model_line(reversed(stack)))
        super().append(guard._replace(sloc=where))


def note_lines(inputs: Sequence[torch.Tensor]) -> None:
    """From here on, note for every guard the line of the model; ``inputs`` are those of the export under way."""
    sizes = _sizes_of(inputs)
    if sizes is not None:
        sizes.guards = _Guards(sizes.guards)


def conditions_of(inputs: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Every condition over the sizes of the inputs of an export, as Python, and the line of the model behind it."""
    sizes = _sizes_of(inputs)
    if sizes is None:
        return
    from torch.fx.experimental.symbolic_shapes import ShapeGuardPythonPrinter  # symbolic algebra takes long to load

    sources = sizes.var_to_sources
    printer = ShapeGuardPythonPrinter(sources, lambda source: source.name, sources)
    for guard in sizes.guards:
        if all(symbol in sources for symbol in guard.expr.free_symbols):
            yield printer.doprint(guard.expr), guard.sloc.maybe_user_loc or ""


def _sizes_of(inputs: Sequence[Any]) -> ShapeEnv | None:
    mode = detect_fake_mode(inputs)
    return None if mode is None else mode.shape_env
