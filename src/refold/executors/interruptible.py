"""Work outside of Python that Ctrl-C ends at once: it runs in a thread of its own, and the caller waits.

Python raises an interrupt between two of its own instructions, and engines compile for seconds outside of Python, or
take the interrupt for a failure of theirs. So the caller waits and hears it; the thread is told to stop, and where it
does not within a moment, it is left behind: what it makes is dropped. (Exports are Python and stay in the caller's
thread: they change what all threads share, and put it back.)
"""

from __future__ import annotations

import contextvars
import ctypes
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

import torch

from refold.capture.exclusive import at_rest

_T = TypeVar("_T")
_HEARTBEAT = 0.1  # seconds between two looks at the thread
_PATIENCE = 0.5  # seconds that a thread which was told to stop may take for cleaning up


def interruptibly(work: Callable[[], _T]) -> _T:
    """Do some work, and raise an interrupt at once. (Only the main thread hears interrupts: others work themselves.)"""
    if threading.current_thread() is not threading.main_thread():
        return work()
    task = _Task(work)
    thread = threading.Thread(target=task.run, name="refold-prepare", daemon=True)
    try:
        with at_rest():
            thread.start()
            task.wait()
    except BaseException:  # an interrupt, or what a signal handler raises
        _stop(thread, task)
        raise
    return task.result()


class _Task(Generic[_T]):
    """Some work with the settings of the thread that asked for it."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self._work = work
        self._made: _T | None = None
        self._error: BaseException | None = None
        self._context = contextvars.copy_context()
        self._gradients, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        self._modes: list[Any] = [torch.autocast(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
        if torch.cuda.is_initialized():
            self._modes.append(torch.cuda.device(torch.cuda.current_device()))
        self._done = threading.Event()

    def run(self) -> None:
        """In the thread."""
        try:
            self._made = self._context.run(self._as_caller)
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self) -> None:
        """In the caller, until the work is done."""
        while not self._done.wait(_HEARTBEAT):
            pass

    def is_done(self, seconds: float) -> bool:
        """Whether the work is done after so long at most."""
        return self._done.wait(seconds)

    def result(self) -> Any:
        """What was made; what was raised is raised."""
        if self._error is not None:
            raise self._error
        return self._made

    def _as_caller(self) -> _T:
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._gradients), ExitStack() as stack:
            for mode in self._modes:
                stack.enter_context(mode)
            return self._work()


def _stop(thread: threading.Thread, task: _Task[Any]) -> None:
    """Tell a thread to end: Python code ends there, and what is outside of Python when it comes back."""
    if thread.ident is not None and not task.is_done(0):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        task.is_done(_PATIENCE)
