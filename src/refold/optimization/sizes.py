"""Other sizes than the example's: calls that are drawn around it, and what capture left open."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold.call_arguments import CallArguments
from refold.capture.captured import RECORD, CaptureRecord
from refold.capture.forward_call import bind_call
from refold.capture.proof import resize, size_groups
from refold.executors.exported_engine import disagreement
from refold.nested import OUTPUT, flatten
from refold.optimization.padded_example import PaddedExample
from refold.wording import first_line

_ATTEMPTS = 12  # at sizes that a condition allows
Shapes = tuple[torch.Size, ...]


def shapes_of(inputs: CallArguments) -> Shapes:
    """The sizes of a call."""
    return tuple(tensor.shape for tensor in inputs.tensors)


def draw_calls(
    inputs: CallArguments, gm: GraphModule, model: nn.Module, most: int = 2, *, tried: bool = True
) -> list[CallArguments]:
    """Calls like this one of other sizes, among those that capture left open: a smaller one and a larger one, of the
    same values repeated or cut. The model itself takes them, if they are tried."""
    record: CaptureRecord | None = gm.meta.get(RECORD)
    if record is None:
        return []
    found: list[CallArguments] = []
    generator = random.Random(0)
    for larger in (False, True)[:most]:
        drawn = next(_allowed(inputs, record, larger, generator, model, tried), None)
        if drawn is not None and shapes_of(drawn) not in map(shapes_of, (inputs, *found)):
            found.append(drawn)
    return found


def _allowed(
    inputs: CallArguments,
    record: CaptureRecord,
    larger: bool,
    generator: random.Random,
    model: nn.Module,
    tried: bool,
) -> Iterator[CallArguments]:
    call, leaves = bind_call(model, inputs.args, inputs.kwargs, {})
    for _ in range(_ATTEMPTS):
        drawn = CallArguments(*call.rebuild(_drawn(record, leaves, larger, generator)))
        if not record.refusal(drawn.args, drawn.kwargs) and (not tried or _is_taken(model, drawn)):
            yield drawn


def _drawn(
    record: CaptureRecord, leaves: Sequence[torch.Tensor], larger: bool, generator: random.Random
) -> list[torch.Tensor]:
    """The tensors with other sizes in all that is open. More rows come with shorter ones, so that the work is alike."""
    resized = list(leaves)
    for _, dims in size_groups(record.sizes):
        first, dim = dims[0]
        size, is_rows = record.sizes.inputs[first].example[dim], dim == 0
        low, high = (size + 1, 2 * size + 1) if larger and is_rows else (max(2, size // 2), max(2, size + 1))
        resized = resize(resized, dims, generator.randint(low, high))
    return resized


def _is_taken(model: nn.Module, call: CallArguments) -> bool:
    """Whether the model itself runs on a call. It gets tensors of its own, since it may write into them."""
    try:
        with torch.no_grad():
            call.copy().given_to(model)
    except Exception:
        return False
    return True


class OtherSizes:
    """What a model gives for calls of other sizes than the example's, with and without padding; `rounding` is the
    coarsest that it computes with."""

    def __init__(
        self, model: Callable[..., Any], calls: Sequence[CallArguments], rounding: float = 0.0, *, padded: bool = True
    ) -> None:
        self.calls, self._rounding = tuple(calls), rounding
        self._padded = [PaddedExample(model, call, rounding) for call in calls[:1]] if padded else []
        self._expected = [_outputs(model, call) for call in calls]

    def objection(self, run: Callable[..., Any], most: int | None = None) -> str | None:
        """What is wrong with the outputs of another way to run the model; None where they agree. Only the first calls
        are run where `most` says so."""
        together = itertools.zip_longest(self.calls, self._padded, self._expected)
        for call, padded, expected in itertools.islice(together, most):
            try:
                found = disagreement(expected, _outputs(run, call), self._rounding)
                found = found or (padded.objection(run) if padded else None)
            except Exception as error:
                found = f"It fails: {first_line(error)}."
            if found is not None:
                return f"at the sizes {', '.join(str(tuple(shape)) for shape in shapes_of(call))}: {found}"
        return None


def _outputs(run: Callable[..., Any], call: CallArguments) -> list[torch.Tensor]:
    with torch.no_grad():
        return flatten(call.copy().given_to(run), OUTPUT)[1]


def has_small_size(given: Sequence[torch.Tensor], example: Shapes) -> bool:
    """Whether a size among these is 0 or 1 where the example has another: what captured graphs often do not take."""
    if not given:
        return False
    pairs = zip(given, example, strict=True)
    return any(a < 2 and a != b for tensor, shape in pairs for a, b in zip(tensor.shape, shape, strict=True))


def size_notes(gm: GraphModule) -> list[str]:
    """What capture fixed or narrowed, and why, for the report."""
    record: CaptureRecord | None = gm.meta.get(RECORD)
    return [] if record is None else [f"Sizes: {sentence}." for sentence in _own_limits(record)]


def has_open_sizes(gm: GraphModule) -> bool:
    """Whether capture left a size open."""
    record: CaptureRecord | None = gm.meta.get(RECORD)
    return record is not None and any(record.sizes.open_dims().values())


def _own_limits(record: CaptureRecord) -> list[str]:
    """Limits that the graph has and the model has not."""
    return [sentence for sentence in record.sizes.described() if "the model itself fails" not in sentence]
