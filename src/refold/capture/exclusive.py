"""Work during which calls of modules in other threads wait.

An export changes what all threads share: it puts fake tensors into the modules of a model, takes the place of
`nn.Module.__call__`, and turns switches that models read. Merging weights gives parameters other memory, which a kernel
may be reading. So calls that have begun go on to their end, those that begin meanwhile wait, and the work is done
alone. It is done all the same if a call does not come to its end (it may itself wait for this thread).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

_T = TypeVar("_T")
_LONGEST_CALL = 30.0  # seconds
_LOCK = threading.RLock()
_CALL = nn.Module._call_impl.__code__
_at_rest: set[int] = set()
"""The threads that wait for the lock, inside of calls or not."""
_letting_finish = False


def alone(work: Callable[[], _T]) -> _T:
    """Do some work while no other thread runs a module. It may be done inside of such work."""
    _at_rest.add(threading.get_ident())
    with _LOCK:
        _at_rest.discard(threading.get_ident())
        with register_module_forward_pre_hook(_wait):  # left behind by an interrupt, it costs a moment and no more
            _let_calls_finish()
            return work()


@contextmanager
def at_rest() -> Iterator[None]:
    """Inside, this thread computes nothing: work of other threads need not wait for its calls, which go on later."""
    me = threading.get_ident()
    was = me in _at_rest
    _at_rest.add(me)
    try:
        yield
    finally:
        if not was:
            _at_rest.discard(me)


def _wait(_module: nn.Module, _args: Any) -> None:
    """Before every call of a module: the thread that works passes, as it owns the lock."""
    if _letting_finish and _calls_on(sys._getframe()) > 1:
        return
    _at_rest.add(threading.get_ident())
    with _LOCK:
        _at_rest.discard(threading.get_ident())


def _let_calls_finish() -> None:
    global _letting_finish
    me, end = threading.get_ident(), time.monotonic() + _LONGEST_CALL
    _letting_finish = True
    try:
        while time.monotonic() < end and _others_call(me):
            time.sleep(0.001)
    finally:
        _letting_finish = False


def _others_call(me: int) -> bool:
    frames = sys._current_frames().items()
    return any(_calls_on(frame) for thread, frame in frames if thread != me and thread not in _at_rest)


def _calls_on(frame: FrameType | None) -> int:
    """How many calls of modules are going on in the thread of a frame."""
    count = 0
    while frame is not None:
        count += frame.f_code is _CALL
        frame = frame.f_back
    return count
