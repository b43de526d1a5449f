"""Questions that are answered while an engine computes: by a thread of its own, on a core that is left over.

Whether a model with hundreds of weights still is what it was takes a few tenths of a millisecond to see, because after
a call none of them is in the processor's cache. An engine that computes outside Python leaves Python to others in the
meantime. Nobody waits for the thread: whoever asked and finds no answer when the engine is done looks for himself. So a
thread that is late, that could not be started or that a fork left behind costs time, and nothing else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

_PENDING: Any = object()


class Question:
    """Something to find out that has no effect, so that it may be found out twice."""

    __slots__ = ("_answer", "_look")

    def __init__(self, look: Callable[[], str | None]) -> None:
        self._look = look
        self._answer: str | None = _PENDING

    def look(self) -> None:
        """Find it out, in whatever thread."""
        self._answer = self._look()

    def answer(self) -> str | None:
        """What was found out; if nobody has yet, it is found out now."""
        if self._answer is _PENDING:
            self.look()
        return self._answer


class _Helper:
    """The thread, started by the first question."""

    def __init__(self) -> None:
        self._questions: SimpleQueue[Question] = SimpleQueue()
        self._starting = threading.Lock()
        self._has_started = False

    def take(self, question: Question) -> None:
        if self._has_started or self._start():
            self._questions.put(question)

    def _start(self) -> bool:
        with self._starting:
            if not self._has_started:
                try:
                    threading.Thread(target=self._work, name="refold-beside", daemon=True).start()
                except RuntimeError:  # no more threads for this process
                    return False
                self._has_started = True
        return True

    def _work(self) -> None:
        while True:
            _look_at(self._questions.get())  # nothing is held while it waits


def _look_at(question: Question) -> None:
    with suppress(Exception):  # whoever asked looks again, and it is raised there
        question.look()


_helper = _Helper()


def ask_beside(look: Callable[[], str | None]) -> Question:
    """Let it be found out while the caller is busy outside Python."""
    question = Question(look)
    _helper.take(question)
    return question


def has_a_core_left(busy: int) -> bool:
    """Whether this process may use more cores than the ones that are busy."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return mine > busy


def _forget_thread() -> None:
    global _helper
    _helper = _Helper()


if hasattr(os, "register_at_fork"):  # threads do not come along, and nobody would ever take the questions away
    os.register_at_fork(after_in_child=_forget_thread)
