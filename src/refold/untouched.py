"""Tensors that were there before a call must not be written into: no record can bring their values back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import GraphModule

from refold.errors import BrokenTransformation
from refold.recording import Recording
from refold.snapshot import Snapshot


def check_tensors_untouched(label: str, before: Snapshot, gm: GraphModule) -> None:
    """Raise if tensors of a photograph were written into since."""
    names = _written(gm, before)
    if names:
        raise BrokenTransformation(
            f"{label} wrote into {', '.join(names)} in place, or replaced their data, which no record can undo. "
            f"{_LOST} A transformation must make new tensors."
        )


@contextmanager
def telling_what_was_written(gm: GraphModule, before: Snapshot, notes: Recording) -> Iterator[None]:
    """If anything is raised inside, add to it which tensors were written into: those stay as they are now."""
    try:
        yield
    except BaseException as error:
        if not any(_LOST in text for text in (str(error), *getattr(error, "__notes__", ()))):
            names = [*_written_in_what_is_left(gm, before), *notes.written()]
            if names:
                told = f"{notes.label} had written into {', '.join(names)} in place, or replaced their data."
                error.add_note(f"{told} {_LOST}")
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
