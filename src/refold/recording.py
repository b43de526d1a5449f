"""What a transformation says while it runs: places rewritten, places refused, weight maps. Kept per thread and call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch.fx import Node

from refold.releasing import Ledger
from refold.result import Refused, Rewritten
from refold.weights import MapRecord


@dataclass
class Recording:
    """The notes of one running call."""

    maps: list[MapRecord] = field(default_factory=list)
    rewritten: list[Rewritten] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    """Where weights that can be computed again give their memory up."""
    signatures: dict[int, int] = field(default_factory=dict)
    """Signatures by the id of the transformation: settings do not change while a call runs."""

    def skip(self, node: Node | str, reason: str) -> None:
        """Say why a place was left alone."""
        self.refused.append(Refused(node if isinstance(node, str) else node.name, reason))

    def rewrote(self, nodes: tuple[Node | str, ...], what: str) -> None:
        """Say what was rewritten."""
        self.rewritten.append(Rewritten(tuple(n if isinstance(n, str) else n.name for n in nodes), what))


_current: ContextVar[Recording | None] = ContextVar("refold_recording", default=None)
_groups: ContextVar[tuple[tuple[int, int], ...]] = ContextVar("refold_groups", default=())


@contextmanager
def recording() -> Iterator[Recording]:
    """A fresh recording for one call; calls nest."""
    notes = Recording()
    token = _current.set(notes)
    try:
        yield notes
    finally:
        _current.reset(token)


def current() -> Recording:
    """The recording of the call that runs in this thread; one that nobody reads when none runs."""
    return _current.get() or Recording()


@contextmanager
def grouped(signature: int, number: int) -> Iterator[None]:
    """Changes recorded inside belong together: they are one call of a composition."""
    token = _groups.set((*_groups.get(), (signature, number)))
    try:
        yield
    finally:
        _groups.reset(token)


def groups() -> tuple[tuple[int, int], ...]:
    """The compositions that run in this thread, outermost first."""
    return _groups.get()
