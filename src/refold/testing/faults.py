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


_NO_FAULT = "no trace of a fault: fewer lines were executed than in the run before"


class Fault(Exception):
    """The exception that is injected."""


class _Lines:
    """Counts the lines that a call executes in watched files, and raises at one of them."""

    def __init__(self, watched: Callable[[CodeType], bool], at: int | None, error: type[BaseException]) -> None:
        self.watched = watched
        self.at = at
        self.error = error
        self.seen: list[Line] = []
        self._files: dict[str, bool] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":  # of every function of torch, too: it must be quick
            name = frame.f_code.co_filename
            if name not in self._files:
                self._files[name] = self.watched(frame.f_code)
            return self if self._files[name] else None
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
    t: Transformation,
    gm: GraphModule,
    *,
    most: int | None = None,
    every_time: bool = True,
    error: type[BaseException] = Fault,
) -> Iterator[str]:
    """Make the lines of applying and reversing fail, one in each run, and tell which left a trace. Without `every_time`
    a line of the source that is executed often fails only the first and the last time. `most` limits the number of
    lines tried each way: an even choice among the first and last execution of each line of the source."""
    for attempt in attempts(t, gm):
        yield from attempt.check(attempt.places(most, every_time), error)


def attempts(t: Transformation, gm: GraphModule) -> Iterator[Attempts]:
    """Applying a transformation to a module, and reversing it if it did anything, as calls to be made fail."""
    watched = of_transformation(t)
    yield Attempts(lambda m: t(m), gm, watched, f"applying {t!r}")
    rewritten = t(copy.deepcopy(gm))

    def reverse(m: GraphModule) -> GraphModule:
        return t(m, reverse=True) if isinstance(t, ReversibleTransformation) else undo(m, None)

    if refold.history(rewritten):
        yield Attempts(reverse, rewritten, watched, f"reversing {t!r}")


class Attempts:
    """One call on one module, to be made again and again with a fault at another line."""

    def __init__(
        self,
        call: Callable[[GraphModule], object],
        gm: GraphModule,
        watched: Callable[[CodeType], bool],
        what: str,
    ) -> None:
        self.call = call
        self.gm = gm
        self.watched = watched
        self.what = what
        call(copy.deepcopy(gm))  # what is imported on first use is executed only once
        done = copy.deepcopy(gm)
        self.lines = executed_lines(lambda: call(done), watched)
        self.done = Portrait.of(done)

    def places(self, most: int | None = None, every_time: bool = True) -> list[int]:
        """The places in the run at which a fault is to be tried."""
        if most is None and not every_time:
            return _ends(self.lines)
        return chosen_places(self.lines, most)

    def check(self, places: list[int], error: type[BaseException]) -> Iterator[str]:
        """Make the call fail at each of some places; a sentence for each that left a trace."""
        victim = _Victim(self.gm)
        for place in places:
            found = victim.differences_after(self.call, self.done, _Lines(self.watched, place, error))
            if found == [_NO_FAULT]:  # what was worked out about a module may be kept: then less is executed again
                victim = _Victim(self.gm)
                found = victim.differences_after(self.call, self.done, _Lines(self.watched, place, error))
            if found:
                file, number = self.lines[place]
                where = f"a fault at {Path(file).name}:{number} (line {place} of {len(self.lines)})"
                yield f"{self.what}: {where} left {'; '.join(found)}"
            if found or not victim.is_whole:
                victim = _Victim(self.gm)


class _Victim:
    """A module on which calls fail. One that came through whole is used again: damage that only adds up shows too."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = copy.deepcopy(gm)
        self.before, self.past = Portrait.of(self.gm), refold.history(self.gm)
        self.held = [*self.gm.parameters(), *self.gm.buffers()]  # only what lives must come back as the same object
        self.is_whole = True

    def differences_after(self, call: Callable[[GraphModule], object], done: Portrait, lines: _Lines) -> list[str]:
        """What differs in the module after a call on it failed at a line. One that overcame the fault must have done
        what the call does without a fault, or something else that can be undone exactly."""
        try:
            _call_traced(lambda: call(self.gm), lines)
        except BaseException:
            found = self.before.differences(Portrait.of(self.gm), same_objects=True)
            now = refold.history(self.gm)
            return found if now is self.past or (not self.past and not now) else [*found, "another history"]
        self.is_whole = False
        if lines.at is None or len(lines.seen) <= lines.at:
            return [_NO_FAULT]
        found, changes = done.differences(Portrait.of(self.gm)), len(refold.history(self.gm)) - len(self.past)
        if found and changes > 0:
            undo(self.gm, changes)
            found = self.before.differences(Portrait.of(self.gm), same_objects=True)
        return found


def chosen_places(lines: list[Line], most: int | None) -> list[int]:
    """Places in a run: all, or an even choice among the first and last execution of each line of the source."""
    if most is None or len(lines) <= most:
        return list(range(len(lines)))
    places = _ends(lines)
    step = max(1.0, len(places) / most)
    picked = {places[int(i * step)] for i in range(min(most, len(places)))}
    return sorted(picked | {len(lines) - 1})


def _ends(lines: list[Line]) -> list[int]:
    """The places of the first and the last execution of each line of the source."""
    first = {line: i for i, line in reversed(list(enumerate(lines)))}
    last = {line: i for i, line in enumerate(lines)}
    return sorted({*first.values(), *last.values()})
