"""The module before and after each of its changes, rebuilt on copies that share its weights' memory but no record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.fx import GraphModule

from refold.capture.captured import RECORD
from refold.record.change import Change
from refold.record.copies import copy_with, working_copy
from refold.record.reversal import undo
from refold.record.stack import attach, history
from refold.verification.float64 import to_float64


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


def float64_copy(module: nn.Module) -> nn.Module:
    """A copy in float64, without history; what its graph was captured for is no longer checked."""
    copy = copy_with(module, lambda t: to_float64(t.detach()))
    if isinstance(copy, GraphModule):
        attach(copy, type(history(copy))())
        copy.meta.pop(RECORD, None)
    return copy
