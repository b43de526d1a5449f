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
from refold.record.reversal import undo
from refold.rewrite.transformation import Transformation
from refold.testing.portrait import Portrait
from refold.testing.processes import reverse

_HOME = str(Path(refold.__file__).parent)
Line = tuple[str, int]

_NO_FAULT = "no fault could be injected: none of the lines was executed again"


class Fault(Exception):
    """The exception that is injected."""


class _Lines:
    """Counts the lines that a call executes in watched files, and raises at one of them: by index, or, whatever else is
    executed, when a line of the source has been executed so many times before."""

    def __init__(
        self, watched: Callable[[CodeType], bool], at: int | tuple[Line, int] | None, error: type[BaseException]
    ) -> None:
        self.watched = watched
        self.index = at if isinstance(at, int) else None
        self.line: Line | None = None
        self.times = 0
        if isinstance(at, tuple):
            self.line, self.times = at
        self.error = error
        self.raised = False
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
        line = (frame.f_code.co_filename, frame.f_lineno)
        self.seen.append(line)
        if self.index == len(self.seen) - 1 or (line == self.line and self._is_time()):
            self.raised = True
            raise self.error(f"injected in {frame.f_code.co_filename}:{frame.f_lineno}")
        return self

    def _is_time(self) -> bool:
        self.times -= 1
        return self.times < 0


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
    """Code of this package, without the tests' own."""
    return code.co_filename.startswith(_HOME) and "/testing/" not in code.co_filename


def of_transformation(t: Transformation) -> Callable[[CodeType], bool]:
    """Code of this package, and of the file in which a transformation is defined."""
    homes = [sys.modules.get(cls.__module__) for cls in type(t).__mro__]
    own = {getattr(home, "__file__", None) for home in homes}
    return lambda code: of_refold(code) or code.co_filename in own


def check_faults(
    t: Transformation, gm: GraphModule, *, most: int | None = None, error: type[BaseException] = Fault
) -> Iterator[str]:
    """Make the lines of applying and reversing fail, one in each run, and say which left a trace. `most` limits the
    number of lines tried each way: an even choice among the first and last execution of each line of the source."""
    for attempt in attempts(t, gm):
        yield from attempt.check(attempt.indices(most), error)


def attempts(t: Transformation, gm: GraphModule) -> Iterator[Attempts]:
    """Applying a transformation to a module, and reversing it if it did anything, as calls to be made fail."""
    watched = of_transformation(t)
    yield Attempts(lambda m: t(m), gm, watched, f"applying {t!r}")
    rewritten = t(copy.deepcopy(gm))
    if refold.history(rewritten):
        yield Attempts(lambda m: reverse(t, m), rewritten, watched, f"reversing {t!r}")


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

    def indices(self, most: int | None = None, every_time: bool = True) -> list[int]:
        """The lines of the run, by index, at which a fault is to be tried: all of them; or, without `every_time` or
        where there are more than `most`, the first and the last execution of each line of the source."""
        if every_time and (most is None or len(self.lines) <= most):
            return list(range(len(self.lines)))
        first = {line: i for i, line in reversed(list(enumerate(self.lines)))}
        last = {line: i for i, line in enumerate(self.lines)}
        ends = sorted({*first.values(), *last.values()})
        if most is None or len(ends) <= most:
            return ends
        return sorted({*(ends[int(i * len(ends) / most)] for i in range(most)), ends[-1]})

    def check(self, indices: list[int], error: type[BaseException]) -> Iterator[str]:
        """Make the call fail at each of these lines, by index; a sentence for each that left a trace."""
        subject, failed = _Subject(self.gm), False
        for index in indices:
            line = self.lines[index]
            subject, found = self._fail(subject, line, self.lines[:index].count(line), error)
            failed = failed or found is not None
            if found:
                where = f"a fault at {Path(line[0]).name}:{line[1]} (line {index} of {len(self.lines)})"
                yield f"{self.what}: {where} left {'; '.join(found)}"
            if found or not subject.is_whole:
                subject = _Subject(self.gm)
        if indices and not failed:
            yield f"{self.what}: {_NO_FAULT}"

    def _fail(
        self, subject: _Subject, line: Line, times: int, error: type[BaseException]
    ) -> tuple[_Subject, list[str] | None]:
        """Make the call fail where a line has been executed so many times before: what differs, and in which module. No
        run need be as long as another: what was worked out about a module may be kept, and a search through a set ends
        sooner or later. So a fresh module is tried next, then the last time that line is executed; None if it is not.
        """
        was_used, lines = subject.is_used, _Lines(self.watched, (line, times), error)
        found = subject.differences_after(self.call, self.done, lines)
        if lines.raised or subject.is_whole:
            return subject, found
        times = times if was_used else lines.seen.count(line) - 1
        fresh = _Subject(self.gm)
        return self._fail(fresh, line, times, error) if times >= 0 else (fresh, None)


class _Subject:
    """A module on which calls fail. One that came through whole is used again: damage that only adds up shows too."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = copy.deepcopy(gm)
        self.before, self.past = Portrait.of(self.gm), refold.history(self.gm)
        self.held = [*self.gm.parameters(), *self.gm.buffers()]  # only what lives must come back as the same object
        self.is_whole, self.is_used = True, False

    def differences_after(self, call: Callable[[GraphModule], object], done: Portrait, lines: _Lines) -> list[str]:
        """What differs in the module after a call on it failed at a line. One that overcame the fault must have done
        what the call does without a fault, or something else that can be undone exactly."""
        self.is_used = True
        try:
            _call_traced(lambda: call(self.gm), lines)
        except BaseException:
            found = self.before.differences(Portrait.of(self.gm), same_objects=True)
            now = refold.history(self.gm)
            return found if now is self.past or (not self.past and not now) else [*found, "another history"]
        self.is_whole = False
        found, changes = done.differences(Portrait.of(self.gm)), len(refold.history(self.gm)) - len(self.past)
        if found and changes > 0:
            undo(self.gm, changes)
            found = self.before.differences(Portrait.of(self.gm), same_objects=True)
        return found
