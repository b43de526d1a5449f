"""Ctrl-C is answered at once while an engine prepares outside of Python, and the model is as it was."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import refold
from refold.executors import Plain, catalogue, interruptible
from refold.executors.interruptible import interruptibly
from refold.testing.model_faults import ModelFacts

X = torch.randn(3, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x) + self.second(x)))


class Blocked(Plain):
    """Prepares outside of Python, where no interrupt arrives, until it is let go."""

    name, hears_interrupts = "blocked", False

    def __init__(self) -> None:
        self.begun, self.let_go, self.thread = threading.Event(), threading.Event(), threading.current_thread()

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        self.thread = threading.current_thread()
        self.begun.set()
        self.let_go.wait(30)
        return super().prepare(module, args, kwargs)


@pytest.fixture
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_when(begun: threading.Event) -> threading.Thread:
    def interrupt() -> None:
        begun.wait(30)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


@pytest.mark.usefixtures("handler")
def test_an_interrupt_while_an_engine_prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = Blocked(), Net().eval()
    monkeypatch.setattr(interruptible, "_PATIENCE", 0.05)
    monkeypatch.setattr(catalogue, "BUILT_IN", (engine,))
    before = ModelFacts.of(model)
    interrupting = interrupt_when(engine.begun)
    with pytest.raises(KeyboardInterrupt):
        refold.optimize(model, (X,), progress=False)
    interrupting.join()
    heard = time.monotonic()
    assert before.differences(ModelFacts.of(model)) == []
    assert engine.thread.is_alive(), "it cannot be stopped there"
    engine.let_go.set()
    engine.thread.join(10)
    assert not engine.thread.is_alive() and time.monotonic() - heard < 10
    assert before.differences(ModelFacts.of(model)) == [], "what it made is dropped"


@pytest.mark.usefixtures("handler")
def test_python_code_in_the_thread_is_stopped_and_cleans_up() -> None:
    begun, cleaned_up = threading.Event(), threading.Event()

    def work() -> None:
        try:
            begun.set()
            while True:
                time.sleep(0.001)
        finally:
            cleaned_up.set()

    interrupting, start = interrupt_when(begun), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interruptibly(work)
    interrupting.join()
    assert cleaned_up.is_set() and time.monotonic() - start < 2


def test_what_the_thread_sees_gives_and_raises() -> None:
    def work() -> tuple[bool, bool, torch.dtype, bool]:
        autocast = torch.is_autocast_enabled("cpu")
        is_main = threading.current_thread() is threading.main_thread()
        return torch.is_grad_enabled(), autocast, torch.get_autocast_dtype("cpu"), is_main

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert interruptibly(work) == (False, True, torch.bfloat16, False)
    assert interruptibly(work)[:2] == (True, False)
    with pytest.raises(ZeroDivisionError):
        interruptibly(lambda: 1 // 0)


def test_a_thread_that_hears_no_interrupts_works_itself() -> None:
    seen: list[threading.Thread] = []
    thread = threading.Thread(target=lambda: interruptibly(lambda: seen.append(threading.current_thread())))
    thread.start()
    thread.join()
    assert seen == [thread]
