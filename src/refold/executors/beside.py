"""Questions that are answered while an engine computes: by a thread of its own, on a core that is left over.

Whether a model with hundreds of weights still is what it was takes a few tenths of a millisecond to see, because after
a call none of them is in the processor's cache. An engine that computes outside Python leaves Python to others in the
meantime. Nobody waits for the thread: whoever asked and finds no answer when the engine is done looks for himself. So a
thread that is late, that could not be started or that a fork left behind costs time, and nothing else.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic

import torch

from .base import T

WORTH_A_THREAD = 64  # weights: to wake a thread takes about as long as to look at so many
_WAKING = 1e-4  # seconds: an engine that is done before the thread is awake has to wait for it
_PENDING: Any = object()


class Question(Generic[T]):
    """Something to find out that has no effect, so that it may be found out twice."""

    __slots__ = ("_answer", "_look", "then")

    def __init__(self, look: Callable[[], T], then: Callable[[], None] | None = None) -> None:
        self._look = look
        self._answer: T = _PENDING
        self.then = then

    def look(self) -> None:
        """Find it out, in whatever thread."""
        self._answer = self._look()

    def answer(self) -> T:
        """What was found out; if nobody has yet, it is found out now."""
        if self._answer is _PENDING:
            self.look()
        return self._answer


class _Helper:
    """The thread, started by the first question."""

    def __init__(self) -> None:
        self.questions: SimpleQueue[Question[Any]] = SimpleQueue()
        self.has_started = False
        self._starting = threading.Lock()

    def start(self) -> bool:
        with self._starting:
            if not self.has_started:
                try:
                    threading.Thread(target=self._work, name="refold-beside", daemon=True).start()
                except RuntimeError:  # no more threads for this process
                    return False
                self.has_started = True
        return True

    def _work(self) -> None:
        while True:
            _look_at(self.questions.get())  # nothing is held while it waits


def _look_at(question: Question[Any]) -> None:
    with suppress(Exception):  # whoever asked looks again, and it is raised there
        question.look()
        if question.then is not None:
            question.then()


_helper = _Helper()


def ask_beside(look: Callable[[], T], then: Callable[[], None] | None = None) -> Question[T]:
    """Let it be found out while the caller is busy outside Python, and then something be done that nobody waits for."""
    question = Question(look, then)
    helper = _helper
    if helper.has_started or helper.start():
        helper.questions.put(question)
    return question


def is_worth_waking(compute: Callable[[], Any]) -> bool:
    """Whether a thread that is woken for an engine has a core to itself, and is awake before the engine is done."""
    return has_a_core_left(torch.get_num_threads()) and _takes(_WAKING, compute)


def _takes(seconds: float, compute: Callable[[], Any]) -> bool:
    for _ in range(3):
        started = time.perf_counter()
        compute()
        took = time.perf_counter() - started
        if not seconds < took < 10 * seconds:  # else once more: it may have been disturbed
            break
    return took > seconds


def has_a_core_left(busy: int) -> bool:
    """Whether this process may use more cores than the ones that are busy."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return mine > busy


def _forget_thread() -> None:
    global _helper
    _helper = _Helper()


if hasattr(os, "register_at_fork"):  # threads do not come along, and nobody would ever take the questions away
    os.register_at_fork(after_in_child=_forget_thread)
