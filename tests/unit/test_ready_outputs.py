"""Outputs that were made ready before a call are those of that call, and of no other."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from refold.executors import executor_named, onnx_runtime
from refold.executors.onnx_runtime import SessionRunner

pytest.importorskip("onnxruntime")
X = torch.randn(3, 4)


class Net(nn.Module):
    def __init__(self, output: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.output = nn.Linear(4, 6), nn.Linear(6, 2), output

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x).relu()
        return self.output(x, hidden)


def both(x: torch.Tensor, hidden: torch.Tensor) -> Any:
    return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=hidden.mean(1))


@pytest.fixture(autouse=True)
def spare_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_runtime, "has_a_core_left", lambda busy: True)
    monkeypatch.setattr(onnx_runtime, "_WAKING", 0.0)


def prepared(model: nn.Module, *args: Any) -> SessionRunner:
    run = executor_named("onnxruntime").prepare(model.eval(), args, {})
    assert isinstance(run, SessionRunner)
    return run


def called(run: SessionRunner, *tensors: torch.Tensor) -> Any:
    output, seen = run.run_while(lambda: "seen", list(tensors), tensors, {})
    assert seen == "seen"
    return output


def wait_until_ready(run: SessionRunner) -> None:
    deadline = time.monotonic() + 10
    while not run.ready_outputs._waiting:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@torch.no_grad()
def test_every_call_has_outputs_of_its_own() -> None:
    model = Net(both)
    run = prepared(model, X)
    inputs = [torch.randn(3, 4) for _ in range(20)]
    outputs = []
    for index, x in enumerate(inputs):
        outputs.append(called(run, x))
        if index % 2:
            wait_until_ready(run)
    for x, output in zip(inputs, outputs, strict=True):
        expected = model(x)
        assert type(output) is type(expected) and list(output) == list(expected)
        torch.testing.assert_close(output.last_hidden_state, expected.last_hidden_state)
        torch.testing.assert_close(output[1], expected[1])
    assert len({tensor.data_ptr() for output in outputs for tensor in output.values()}) == 40


@torch.no_grad()
def test_outputs_are_made_while_the_call_before_computes() -> None:
    run = prepared(Net(both), X)
    called(run, X)
    wait_until_ready(run)
    ready = run.ready_outputs._waiting[0]
    assert called(run, X) is ready.output
    assert called(run, X) is not ready.output


ODD = {
    "not contiguous": lambda: torch.randn(4, 3).t(),
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "negative when it is read": lambda: torch._neg_view(torch.randn(3, 4)),
    "requires gradients": lambda: torch.randn(3, 4, requires_grad=True),
    "somewhere in other memory": lambda: torch.randn(13)[1:].view(3, 4),
    "a parameter": lambda: nn.Parameter(torch.randn(3, 4)),
}


@pytest.mark.parametrize("name", ODD)
@torch.no_grad()
def test_inputs_may_lie_anyhow(name: str) -> None:
    model = Net(both)
    run = prepared(model, X)
    for _ in range(3):
        x = ODD[name]()
        torch.testing.assert_close(called(run, x)[0], model(x)[0])


@torch.no_grad()
def test_an_input_among_the_outputs_is_that_of_the_call() -> None:
    model = Net(lambda x, hidden: {"given": x, "hidden": hidden, "again": hidden})
    run = prepared(model, X)
    for _ in range(3):
        x = torch.randn(3, 4)
        output = called(run, x)
        assert output["given"] is x and output["again"] is output["hidden"]
        torch.testing.assert_close(output["hidden"], model(x)["hidden"])


@pytest.mark.parametrize(
    "output",
    [
        lambda x, hidden: hidden[x.sum(1) > 0],
        lambda x, hidden: hidden[:, :0],
        lambda x, hidden: hidden.repeat(400, 400),
    ],
    ids=["of a size that depends on values", "empty", "large"],
)
@torch.no_grad()
def test_other_outputs_are_made_after_the_call(output: Any) -> None:
    model = Net(output)
    run = prepared(model, X)
    assert run.ready_outputs is None and run.hides_looks_from is not None
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(called(run, x), model(x))


@pytest.mark.parametrize("fault", ["is missing", "writes nothing"])
def test_an_engine_that_does_not_take_them_is_asked_in_the_old_way(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from refold.executors import ready_outputs

    def bind_nothing(self: Any, ready: Any, tensors: Any) -> Any:
        return ready.output

    if fault == "is missing":
        monkeypatch.setattr(ready_outputs.ReadyOutputs, "feed", None)
    else:
        monkeypatch.setattr(ready_outputs.ReadyOutputs, "compute", bind_nothing)
    model = Net(both)
    run = prepared(model, X)
    assert run.ready_outputs is None
    with torch.no_grad():
        torch.testing.assert_close(called(run, X)[0], model(X)[0])


@torch.no_grad()
def test_a_call_that_fails_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(both)
    run = prepared(model, X)
    works = run.ready_outputs._run

    def fails(*args: Any) -> None:
        raise RuntimeError("out of memory")

    run.ready_outputs._run = fails
    with pytest.raises(RuntimeError, match="out of memory"):
        called(run, X)
    run.ready_outputs._run = works
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(called(run, x)[0], model(x)[0])


@torch.no_grad()
def test_calls_in_many_threads_get_their_own() -> None:
    model = Net(both)
    run, reference = prepared(model, X), copy.deepcopy(model)
    wrong: list[torch.Tensor] = []

    def call() -> None:
        with torch.no_grad():
            for _ in range(100):
                x = torch.randn(3, 4)
                output = called(run, x)
                time.sleep(0)
                if not torch.allclose(output[0], reference(x)[0], atol=1e-5):
                    wrong.append(x)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(run.ready_outputs._waiting) <= 1


def test_in_inference_mode_and_on_another_default_device() -> None:
    model = Net(both)
    run = prepared(model, X)
    with torch.inference_mode(), torch.device("meta"):
        outputs = [called(run, X) for _ in range(3)]
    assert all(output[0].device.type == "cpu" for output in outputs)
    with torch.no_grad():
        torch.testing.assert_close(outputs[-1][0], model(X)[0])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float64, torch.float16, torch.uint8])
@torch.no_grad()
def test_types(dtype: torch.dtype) -> None:
    class Cast(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.float() + 1, (x.float() > 0).to(dtype)

    x = torch.tensor([[0, 1, 1], [1, 0, 0]]).to(dtype)
    run = prepared(Cast(), x)
    assert run.ready_outputs is not None
    for given in (x, x.flip(0)):
        for mine, its in zip(called(run, given), Cast()(given), strict=True):
            assert mine.dtype == its.dtype and torch.equal(mine, its)
