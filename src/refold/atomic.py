"""All or nothing: whatever is raised inside, the module is put back exactly as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.fx import GraphModule

from refold.snapshot import Snapshot

_INTERRUPTS_ENDURED = 100
_T = TypeVar("_T")


def atomically(gm: GraphModule, work: Callable[[Snapshot], _T]) -> _T:
    """Photograph a module and do some work on it; if anything is raised (Ctrl-C included), put it back to the
    photograph. The work is a function and not the body of a `with`: an interrupt that comes while a `with` is being
    left, after its body is done, is seen by nobody. For the same reason `work` does everything, also what comes last.
    """
    before = Snapshot.of(gm)
    try:
        outcome = work(before)
        before.ledger.settle()
        return outcome
    except BaseException:
        _put_back(gm, before)
        raise


def _put_back(gm: GraphModule, before: Snapshot) -> None:
    """Restoring can be repeated, so an interrupt in the middle of it only makes it start again."""
    for _ in range(_INTERRUPTS_ENDURED):
        try:
            before.ledger.refill()
            before.restore(gm)
            return
        except KeyboardInterrupt:
            continue
    before.ledger.refill()
    before.restore(gm)
