"""Packed batches on a GPU: one look at the mask, then a CUDA graph for the number of real tokens, rounded up.

Each call replays a graph that looks at its mask, waits for the answer, and replays the graph for as many tokens, which
are recorded over code that is compiled once, for any size. Attention runs over the tokens of each row by one kernel,
which takes half precision only, and is no slower where no place is padding. Calls that cannot be packed
(`RemovePadding` says when) are few, so what computes densely is recorded as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from refold.errors import PreparationFailed
from refold.executors.input_spec import InputSpec, refuse_gradients
from refold.executors.interface import Checked, Executor, refuse_training
from refold.executors.plain import Plain
from refold.executors.sized_cuda_graphs import Ready, recorded
from refold.executors.split_packing import KEPT, STARTS, SplitPacking, split_packing
from refold.executors.torch_compile import CompiledInFirstCall
from refold.patterns.packing.token_operators import MASKED

STEP = 128
"""Tokens are rounded up to a multiple of this."""


class PackedCudaGraph(Executor):
    """Graphs for tokens, not for rows and positions. `record` makes an executor that replays what it is given, which is
    worth compiling where it is what calls usually run."""

    name = "packed+cuda_graph"
    takes_any_size = True
    keeps_meaning = True
    hears_interrupts = True
    takes_packed = True

    def __init__(self, record: Callable[[nn.Module, bool], Executor] | None = None) -> None:
        self._record = record or _recorded

    def available(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else f"a CUDA graph needs a CUDA device, not {device.type}"

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        refuse_training(module)
        split = split_packing(module, STEP)
        if any(p.is_cuda and p.is_floating_point() and p.element_size() != 2 for p in module.parameters()):
            raise PreparationFailed("Attention over rows of any length takes half precision only.")
        return PackedRunner(split, self._record, args, kwargs)


class PackedRunner(Checked):
    """Looks at the mask of a call and replays the graph that fits."""

    is_asynchronous = True

    def __init__(
        self,
        split: SplitPacking,
        record: Callable[[nn.Module, bool], Executor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.spec = InputSpec.of(args, kwargs, open_sizes=True)
        self.weights = [*split.dense.parameters(), *split.dense.buffers()]
        with torch.no_grad():
            self.plan = record(split.plan, True).prepare(split.plan, args, kwargs)
            sound, self.kinds, given = self._look(args, kwargs)
            if not sound or MASKED in self.kinds:
                raise PreparationFailed("The example cannot be packed for this way: its mask, or that of attention.")
            packed = split.for_kinds(tuple(self.kinds), STEP)
            self.packed = record(packed, True).prepare(packed, args, kwargs | given)
            self.dense = record(split.dense, False).prepare(split.dense, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run_checked(self.spec.tensors(args, kwargs), args, kwargs)

    def run_checked(self, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refuse_gradients(tensors, self.weights)
        with torch.no_grad():
            sound, kinds, given = self._look(args, kwargs)
            if sound and kinds == self.kinds:
                return self.packed(*args, **kwargs, **given)
            return self.dense(*args, **kwargs)

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, list[int], dict[str, torch.Tensor]]:
        """Wait for what the mask says: whether the call can be packed, of which kinds the masks of attention are, and
        which tokens there are."""
        facts, kept, starts = self.plan(*args, **kwargs)
        sound, tokens, *kinds = facts.tolist()
        rounded = -(-tokens // STEP) * STEP
        starts[-1] = rounded
        return bool(sound), kinds, {KEPT: kept[:rounded], STARTS: starts}


def _recorded(module: nn.Module, is_usual: bool) -> Executor:
    return recorded(Ready("compiled once", CompiledInFirstCall(module)) if is_usual else Plain())
