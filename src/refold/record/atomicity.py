"""All or nothing: whatever is raised inside, the module is put back exactly as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch.fx import GraphModule

from refold.errors import BrokenTransformation
from refold.record.call_notes import Recording
from refold.record.marks import show_marks
from refold.record.sharded_modules import manage_parameters, show_shards
from refold.record.snapshot import Snapshot

_T = TypeVar("_T")


def atomically(gm: GraphModule, work: Callable[[Snapshot], _T]) -> _T:
    """Take a snapshot of a module and do some work on it; if anything is raised (Ctrl-C included), restore the
    snapshot. The work is a function and not the body of a `with`: an interrupt that comes while a `with` is being
    left, after its body is done, would be missed. For the same reason `work` does everything, also what comes last.
    """
    show_shards(gm)
    before = Snapshot.of(gm)
    try:
        outcome = work(before)
        manage_parameters(gm)
        before.released.settle()
        show_marks(gm.graph)
        return outcome
    except BaseException:
        _put_back(gm, before)
        raise


def _put_back(gm: GraphModule, before: Snapshot) -> None:
    """Restoring can be repeated, so an interrupt in the middle of it only makes it start again."""
    while True:
        try:
            before.released.refill()
            before.restore(gm)
            show_marks(gm.graph)
            return
        except KeyboardInterrupt:
            continue


def check_tensors_untouched(label: str, before: Snapshot, gm: GraphModule) -> None:
    """Raise if tensors of a snapshot were written into since."""
    names = _written(gm, before)
    if names:
        raise BrokenTransformation(
            f"{label} wrote into {', '.join(names)} in place, or replaced their data, which no record can undo. "
            f"{_LOST} A transformation must make new tensors."
        )


@contextmanager
def naming_written_tensors(gm: GraphModule, before: Snapshot, notes: Recording) -> Iterator[None]:
    """If anything is raised inside, add to it which tensors were written into: those stay as they are now."""
    try:
        yield
    except BaseException as error:
        if not any(_LOST in text for text in (str(error), *getattr(error, "__notes__", ()))):
            names = [*_written_in_what_is_left(gm, before), *notes.written()]
            if names:
                sentence = f"{notes.label} had written into {', '.join(names)} in place, or replaced their data."
                error.add_note(f"{sentence} {_LOST}")
        raise


_LOST = "The graph was put back; the values of these tensors were not."


def _written(gm: GraphModule, before: Snapshot) -> list[str]:
    written = before.written_in_place(gm)
    return [name for name, tensor in before.tensors().items() if any(tensor is w for w in written)]


def _written_in_what_is_left(gm: GraphModule, before: Snapshot) -> list[str]:
    try:
        return _written(gm, before)
    except Exception:  # a call that failed half-way may leave a module that cannot even be walked through
        return []
