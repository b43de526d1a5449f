"""All or nothing: whatever is raised inside, the module is put back exactly as it was."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

from torch.fx import GraphModule

from refold.snapshot import Snapshot

_INTERRUPTS_ENDURED = 100
_T = TypeVar("_T")
_numbers = itertools.count(1)
_done = 0


def operations_done() -> int:
    """A number that is another one after every change of a module, done, undone or failed: weights may have got other
    memory then."""
    return _done


def atomically(gm: GraphModule, work: Callable[[Snapshot], _T]) -> _T:
    """Photograph a module and do some work on it; if anything is raised (Ctrl-C included), put it back to the
    photograph. The work is a function and not the body of a `with`: an interrupt that comes while a `with` is being
    left, after its body is done, is seen by nobody. For the same reason `work` does everything, also what comes last.
    """
    _count()
    before = Snapshot.of(gm)
    try:
        outcome = work(before)
        before.ledger.settle()
        _count()
        return outcome
    except BaseException:
        _put_back(gm, before)
        raise


def _count() -> None:
    global _done
    _done = next(_numbers)  # two threads get two numbers


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
