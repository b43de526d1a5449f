"""Models that run in other threads while one is captured or optimized give what they always give, or wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_modules

import refold
from refold.capture import exclusive
from refold.capture.exclusive import alone

X = torch.randn(3, 8)


class Net(nn.Module):
    """Rounds otherwise while it is exported, and calls many parts."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.norms = nn.Sequential(*[nn.LayerNorm(8) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norms(x)
        mixed = (self.query(x) @ self.key(x).T).softmax(-1) @ self.value(x)
        return mixed * 3.0 / 3.0 if torch.compiler.is_exporting() else mixed


@contextmanager
def called_by_others(models: list[nn.Module], threads: int = 8) -> Iterator[list[str]]:
    """Other threads call the models inside; what went wrong there, and the ends of all of them when it is left."""
    with torch.no_grad():
        expected = [model(X).clone() for model in models]
    wrong: list[str] = []
    stop = threading.Event()

    def call(which: int) -> None:
        while not stop.is_set():
            try:
                with torch.no_grad():
                    found = models[which](X)
                if type(found) is not torch.Tensor or not torch.equal(found, expected[which]):
                    wrong.append(f"model {which} gave {found}")
            except Exception as error:
                wrong.append(f"model {which} raised {error!r}")

    workers = [threading.Thread(target=call, args=(i % len(models),)) for i in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield wrong
    finally:
        stop.set()
        for worker in workers:
            worker.join()


@pytest.mark.parametrize(
    "work",
    [
        lambda model: refold.trace(model, X),
        lambda model: refold.optimize(model, (X,), backend="plain", progress=False).restore(),
    ],
    ids=["trace", "optimize"],
)
def test_others_get_their_numbers(work: Callable[[nn.Module], Any]) -> None:
    model, other = Net().eval(), Net().eval()
    with called_by_others([model, other]) as wrong:
        work(model)
    assert wrong == []


def test_a_call_that_has_begun_comes_to_its_end_first() -> None:
    events: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            begun.set()
            go_on.wait(10)
            x = self.inner(x)
            events.append("called")
            return x

    thread = threading.Thread(target=lambda: Slow()(X))
    thread.start()
    assert begun.wait(10)
    threading.Timer(0.2, go_on.set).start()
    alone(lambda: events.append("alone"))
    thread.join()
    assert events == ["called", "alone"]


def test_a_call_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls that both want to be alone, and one that waits for this thread."""
    monkeypatch.setattr(exclusive, "_LONGEST_CALL", 0.2)
    done, begun = threading.Event(), threading.Event()

    class Waiting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            begun.set()
            alone(lambda: None)
            assert done.wait(10)
            return x

    threads = [threading.Thread(target=lambda: Waiting()(X)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    assert alone(lambda: nn.Linear(8, 8)(X).shape) == (3, 8), "its own calls do not wait"
    done.set()
    for thread in threads:
        thread.join()


def test_nothing_is_left_behind_by_what_fails() -> None:
    def fail() -> None:
        alone(lambda: None)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        alone(fail)
    assert not torch_modules._global_forward_pre_hooks
    with called_by_others([Net().eval()], 1) as wrong:
        pass
    assert wrong == []
