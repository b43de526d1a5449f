"""All or nothing: whatever is raised inside, the module is put back exactly as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import GraphModule

from refold.snapshot import Snapshot

_INTERRUPTS_ENDURED = 100


@contextmanager
def atomic(gm: GraphModule) -> Iterator[Snapshot]:
    """Photograph a module, and put it back to the photograph if anything is raised (Ctrl-C included)."""
    before = Snapshot.of(gm)
    try:
        yield before
    except BaseException:
        _put_back(gm, before)
        raise


def _put_back(gm: GraphModule, before: Snapshot) -> None:
    """Restoring can be repeated, so an interrupt in the middle of it only makes it start again."""
    for _ in range(_INTERRUPTS_ENDURED):
        try:
            before.restore(gm)
            return
        except KeyboardInterrupt:
            continue
    before.restore(gm)
