"""Make every line fail in turn: a module must be exactly as before, whichever line of a call raises."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from torch.fx import GraphModule

import refold
from refold.history import undo
from refold.testing.exactness import Portrait
from refold.transformation import ReversibleTransformation, Transformation

_HOME = str(Path(refold.__file__).parent)
Line = tuple[str, int]


class Fault(Exception):
    """The exception that is injected."""


class _Lines:
    """Counts the lines that a call executes in watched files, and raises at one of them."""

    def __init__(self, watched: Callable[[CodeType], bool], at: int | None, error: type[BaseException]) -> None:
        self.watched = watched
        self.at = at
        self.error = error
        self.seen: list[Line] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            return self if self.watched(frame.f_code) else None
        if event != "line":
            return self
        self.seen.append((frame.f_code.co_filename, frame.f_lineno))
        if self.at == len(self.seen) - 1:
            raise self.error(f"injected in {frame.f_code.co_filename}:{frame.f_lineno}")
        return self


def executed_lines(call: Callable[[], object], watched: Callable[[CodeType], bool]) -> list[Line]:
    """The lines of watched code that a call executes in this thread, in order."""
    lines = _Lines(watched, None, Fault)
    _call_traced(call, lines)
    return lines.seen


def _call_traced(call: Callable[[], object], lines: _Lines) -> None:
    former = sys.gettrace()
    sys.settrace(lines)
    try:
        call()
    finally:
        sys.settrace(former)


def of_refold(code: CodeType) -> bool:
    """Code of this package, besides the tests' own."""
    return code.co_filename.startswith(_HOME) and "/testing/" not in code.co_filename


def of_transformation(t: Transformation) -> Callable[[CodeType], bool]:
    """Code of this package, and of the file in which a transformation is defined."""
    homes = [sys.modules.get(cls.__module__) for cls in type(t).__mro__]
    own = {getattr(home, "__file__", None) for home in homes}
    return lambda code: of_refold(code) or code.co_filename in own


def check_faults(
    t: Transformation, gm: GraphModule, *, most: int | None = None, error: type[BaseException] = Fault
) -> Iterator[str]:
    """Make the lines of applying and reversing fail, one in each run, and tell which left a trace. `most` limits the
    number of lines tried each way: each line of the source is tried before any is tried again, evenly spread."""
    watched = of_transformation(t)
    yield from _check_call(lambda m: t(m), gm, watched, most, error, f"applying {t!r}")
    rewritten = t(copy.deepcopy(gm))

    def reverse(m: GraphModule) -> GraphModule:
        return t(m, reverse=True) if isinstance(t, ReversibleTransformation) else undo(m, None)

    if refold.history(rewritten):
        yield from _check_call(reverse, rewritten, watched, most, error, f"reversing {t!r}")


def _check_call(
    call: Callable[[GraphModule], object],
    gm: GraphModule,
    watched: Callable[[CodeType], bool],
    most: int | None,
    error: type[BaseException],
    what: str,
) -> Iterator[str]:
    done = copy.deepcopy(gm)
    total = executed_lines(lambda: call(done), watched)
    for place in chosen_places(total, most):
        file, number = total[place]
        found = _trace_left(call, copy.deepcopy(gm), Portrait.of(done), _Lines(watched, place, error))
        if found:
            where = f"a fault at {Path(file).name}:{number} (line {place} of {len(total)})"
            yield f"{what}: {where} left {'; '.join(found)}"


def _trace_left(call: Callable[[GraphModule], object], victim: GraphModule, done: Portrait, lines: _Lines) -> list[str]:
    """What differs in a module after a call on it failed at a line; after one that overcame the fault, what differs
    from the call without a fault."""
    before, past = Portrait.of(victim), refold.history(victim)
    held = [*victim.parameters(), *victim.buffers()]  # only what lives must come back as the same object
    try:
        _call_traced(lambda: call(victim), lines)
    except BaseException:
        found = before.differences(Portrait.of(victim), same_objects=True)
        now = refold.history(victim)
        return found if now is past or (not past and not now) else [*found, "another history"]
    if lines.at is None or len(lines.seen) <= lines.at:
        return [f"no fault: only {len(lines.seen)} of {lines.at} lines were executed, {len(held)} tensors held"]
    return done.differences(Portrait.of(victim))


def chosen_places(lines: list[Line], most: int | None) -> list[int]:
    """Places in a run: all, or an even choice among the first and last execution of each line of the source."""
    if most is None or len(lines) <= most:
        return list(range(len(lines)))
    first = {line: i for i, line in reversed(list(enumerate(lines)))}
    last = {line: i for i, line in enumerate(lines)}
    places = sorted({*first.values(), *last.values()})
    step = max(1.0, len(places) / most)
    picked = {places[int(i * step)] for i in range(min(most, len(places)))}
    return sorted(picked | {len(lines) - 1})
