"""A model is looked at while an engine computes: the answers count as those that are had before, whoever gives them."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import threading
import time
import weakref
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn

import refold
from refold.executors import Checked, Signature, beside, executor_named
from refold.executors.beside import Question, ask_beside, has_a_core_left
from refold.optimizing.freshness import Freshness, read_in_eval
from refold.optimizing.optimized import OptimizedModule
from refold.optimizing.sameness import Sameness
from refold.optimizing.variant import Variant
from refold.report.data import ModelSummary, Report

X = torch.randn(3, 4)
LAYERS = 40


class Engine(Checked):
    """Computes with copies of the weights and leaves Python to others for a while."""

    hides_looks_from = 64

    def __init__(self, model: nn.Module, seconds: float = 0.02) -> None:
        self.copy, self.seconds, self.runs = copy.deepcopy(model), seconds, 0

    def run_checked(self, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.runs += 1
        time.sleep(self.seconds)
        return self.copy(*args, **kwargs)

    def run_while(self, look: Any, tensors: Any, args: Any, kwargs: Any) -> Any:
        question = ask_beside(look)
        return self.run_checked(tensors, args, kwargs), question.answer()


class Device(Engine):
    """Computes by itself once it is launched."""

    hides_looks_from = 0

    def run_while(self, look: Any, tensors: Any, args: Any, kwargs: Any) -> Any:
        return self.run_checked(tensors, args, kwargs), look()


class Watched(Sameness):
    """Keeps the names of the threads that asked."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.asked_by: list[str] = []

    def why_not(self) -> str | None:
        self.asked_by.append(threading.current_thread().name)
        return super().why_not()


def layers(count: int = LAYERS) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count))).eval()


def built(model: nn.Module, engine: Any) -> tuple[OptimizedModule, Watched]:
    watched = Watched(model)
    freshness = Freshness(read_in_eval(model), None, follows=False)
    report = Report("engine", ModelSummary("model"))
    made = Variant(Signature.of((X,), {}), None, engine, "engine", freshness, report, sameness=watched)
    return OptimizedModule(model, made), watched


@torch.no_grad()
def test_another_thread_looks_while_the_engine_computes() -> None:
    model = layers()
    fast, watched = built(model, Engine(model))
    for _ in range(3):
        assert torch.equal(fast(X), model(X))
    assert watched.asked_by == ["refold-beside"] * 3 and not fast.notes


@torch.no_grad()
def test_what_was_computed_with_old_weights_is_thrown_away_and_not_computed_again() -> None:
    model = layers()
    engine = Engine(model)
    fast, _ = built(model, engine)
    model[7].bias.add_(1)
    for _ in range(3):
        assert torch.equal(fast(X), model(X))
    assert engine.runs == 1 and fast.notes == [
        "ran the original: weights of the original were changed since it was optimized"
    ]


@torch.no_grad()
def test_what_only_launches_is_launched_before_anybody_looks() -> None:
    """A device computes by itself: there is time to look, and no thread is needed."""
    model = layers(2)
    engine = Device(model, seconds=0)
    fast, watched = built(model, engine)
    runs_when_asked: list[int] = []
    ask = watched.why_not
    watched.why_not = lambda: runs_when_asked.append(engine.runs) or ask()
    assert torch.equal(fast(X), model(X)) and runs_when_asked == [1]
    assert watched.asked_by == [threading.current_thread().name] and not fast.notes
    model[0].bias.add_(1)
    for _ in range(3):
        assert torch.equal(fast(X), model(X))
    assert engine.runs == 2, "computed in vain once, then looked at first"


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_look_that_fails_leaves_the_engine_free(name: str) -> None:
    pytest.importorskip(name)
    model = layers(2)
    run = executor_named(name).prepare(model, (X,), {})
    with torch.no_grad():
        output, seen = run.run_while(lambda: "seen", [X], (X,), {})
        torch.testing.assert_close(output, model(X))
        assert seen == "seen"
        with pytest.raises(ZeroDivisionError):
            run.run_while(lambda: 1 // 0, [X], (X,), {})
        torch.testing.assert_close(run(X + 1), model(X + 1), msg="it is free for the next call")


@pytest.mark.parametrize("why", ["few weights", "an engine inside Python"])
@torch.no_grad()
def test_where_it_does_not_pay_the_caller_looks_first(why: str) -> None:
    model = layers(2 if why == "few weights" else LAYERS)
    engine = Engine(model)
    if why == "an engine inside Python":
        engine.hides_looks_from = None
    fast, watched = built(model, engine)
    assert torch.equal(fast(X), model(X))
    assert watched.asked_by == [threading.current_thread().name]
    model[0].bias.add_(1)
    assert torch.equal(fast(X), model(X)) and engine.runs == 1


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
@pytest.mark.parametrize(("cores", "seconds", "looks_beside"), [(1, 0.0, True), (0, 0.0, False), (1, 10.0, False)])
def test_engines_have_the_model_looked_at_beside(
    name: str, cores: int, seconds: float, looks_beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a core is left, and if they do not compute for too short a time."""
    pytest.importorskip(name)
    monkeypatch.setattr(beside, "has_a_core_left", lambda busy: bool(cores))
    monkeypatch.setattr(beside, "_WAKING", seconds)
    model = layers()
    fast = refold.optimize(model, (X,), backend=name, progress=False)
    assert fast.variants[0].looks_first is not looks_beside
    with torch.no_grad():
        torch.testing.assert_close(fast(X), copy.deepcopy(model)(X))
        assert not fast.notes
        model[7].bias.add_(1)
        assert torch.equal(fast(X), copy.deepcopy(model)(X)) and len(fast.notes) == 1


@pytest.mark.parametrize("trouble", ["late", "cannot start"])
@torch.no_grad()
def test_nobody_waits_for_the_thread(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = beside._Helper()
    if trouble == "late":
        helper.has_started = True  # and nobody takes the questions
    else:
        monkeypatch.setattr(beside.threading, "Thread", cannot_start)
    monkeypatch.setattr(beside, "_helper", helper)
    model = layers()
    fast, watched = built(model, Engine(model, seconds=0))
    assert torch.equal(fast(X), model(X)) and not fast.notes
    model[3].weight.mul_(2)
    assert torch.equal(fast(X), model(X)) and len(fast.notes) == 1
    assert set(watched.asked_by) == {threading.current_thread().name}


def cannot_start(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("can't start new thread")


def test_what_looking_raises_is_raised_to_whoever_asked() -> None:
    seen: list[str] = []

    def look() -> str | None:
        seen.append(threading.current_thread().name)
        raise ValueError("no")

    question = ask_beside(look)
    wait_for(lambda: bool(seen))
    with pytest.raises(ValueError, match="no"):
        question.answer()
    assert seen == ["refold-beside", threading.current_thread().name]
    again = ask_beside(lambda: "still there")
    wait_for(lambda: again._answer is not beside._PENDING)
    assert again.answer() == "still there", "the thread goes on"


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_thread_holds_nothing_while_it_waits() -> None:
    model = layers()
    fast, _ = built(model, Engine(model))
    with torch.no_grad():
        fast(X)
    gone = weakref.ref(model)
    del model, fast, _
    gc.collect()
    assert gone() is None


@torch.no_grad()
def test_calls_in_many_threads_never_get_old_weights() -> None:
    model = layers()
    fast, _ = built(model, Engine(model, seconds=0.001))
    old, written, wrong = model(X), threading.Event(), []

    def call() -> None:
        with torch.no_grad():
            for _ in range(30):
                after = written.is_set()
                output = fast(X)
                if after and torch.allclose(output, old):
                    wrong.append(output)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    model[-1].bias.add_(1)
    written.set()
    for thread in threads:
        thread.join()
    assert not wrong and len(set(fast.notes)) == 1


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system does not fork")
def test_after_a_fork_there_is_a_thread_again() -> None:
    """Threads are not forked. Questions that nobody takes would pile up."""
    question = ask_beside(lambda: None)
    wait_for(lambda: question._answer is None)  # the parent has its thread
    answers = multiprocessing.get_context("fork").SimpleQueue()
    child = multiprocessing.get_context("fork").Process(target=ask_in_child, args=(answers,))
    child.start()
    child.join(30)
    assert child.exitcode == 0 and answers.get() == "refold-beside"


def ask_in_child(answers: Any) -> None:
    names: SimpleQueue[str] = SimpleQueue()
    ask_beside(lambda: names.put(threading.current_thread().name))
    answers.put(names.get(timeout=10))


def test_what_is_done_afterwards_is_done_by_the_thread_alone() -> None:
    done: list[str] = []
    question = ask_beside(lambda: None, lambda: done.append(threading.current_thread().name))
    question.answer()
    wait_for(lambda: done == ["refold-beside"])
    ask_beside(lambda: None, lambda: done.append(str(1 // 0)))
    again = ask_beside(lambda: None, lambda: done.append("after an error"))
    again.answer()
    wait_for(lambda: done == ["refold-beside", "after an error"])


def test_a_question_is_answered_once() -> None:
    looks: list[int] = []
    question = Question(lambda: looks.append(1))
    assert question.answer() is None and question.answer() is None and len(looks) == 1


def test_cores() -> None:
    assert has_a_core_left(0) and not has_a_core_left(10**6)
