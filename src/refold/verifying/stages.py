"""The module before and after each of its changes, rebuilt on copies that share its weights' memory but no record."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import GraphModule

from refold import fx_private
from refold.capturing.module import RECORD
from refold.change import Change
from refold.history import attach, history, undo
from refold.hollow import parameter_over
from refold.keeping import held_tensors
from refold.verifying.arithmetic import widen


@dataclass(frozen=True)
class Stage:
    """One change with the module right before and right after it."""

    before: GraphModule
    change: Change
    after: GraphModule


def stages(gm: GraphModule, n: int) -> Iterator[Stage]:
    """The latest `n` changes, the latest first."""
    after = working_copy(gm)
    for _ in range(n):
        change = history(after)[-1]
        before = undo(working_copy(after))
        yield Stage(before, change, after)
        after = before


def working_copy(module: GraphModule) -> GraphModule:
    """A copy to undo and to run: tensor objects and records of its own, over the same memory."""
    twin = copied(module, torch.Tensor.detach)
    assert isinstance(twin, GraphModule)
    return twin


def wide_copy(module: nn.Module) -> nn.Module:
    """A copy in float64, without history; what its graph was captured for is no longer checked."""
    twin = copied(module, lambda t: widen(t.detach()))
    if isinstance(twin, GraphModule):
        attach(twin, type(history(twin))())
        twin.meta.pop(RECORD, None)
    return twin


def copied(module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """A deep copy whose tensors are made by `convert` instead of being copied."""
    memo: dict[int, object] = {}
    for tensor in _all_tensors(module):
        if id(tensor) not in memo:
            memo[id(tensor)] = _twin(tensor, convert(tensor))
    return copy.deepcopy(module, memo)


def _twin(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, nn.Parameter):
        return values
    return parameter_over(values, tensor.requires_grad)


def _all_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for _path, part in fx_private.walk_modules(module):
        for name in ("_parameters", "_buffers"):
            table = part.__dict__.get(name) or {}
            yield from (t for t in table.values() if isinstance(t, torch.Tensor))
    for change in history(module) if isinstance(module, GraphModule) else ():
        for entry in change.tables.values():
            for value in entry.before.values():
                yield from held_tensors(value)
        for record in change.maps:
            yield from (*record.kept.values(), *record.originals.values())
