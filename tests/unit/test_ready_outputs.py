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

from refold.executors import Runner, beside, executor_named
from refold.executors.onnx_runtime import BoundSession

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
    monkeypatch.setattr(beside, "has_a_core_left", lambda busy: True)
    monkeypatch.setattr(beside, "_WAKING", 0.0)


@pytest.fixture(params=["onnxruntime", "openvino"])
def engine(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return str(request.param)


def prepared(engine: str, model: nn.Module, *args: Any) -> Any:
    run = executor_named(engine).prepare(model.eval(), args, {})
    assert isinstance(run, Runner)
    return run


def called(run: Any, *tensors: torch.Tensor) -> Any:
    output, seen = run.run_while(lambda: "seen", list(tensors), tensors, {})
    assert seen == "seen"
    return output


def wait_until_ready(run: Any) -> None:
    deadline = time.monotonic() + 10
    while not run.ready._waiting:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@torch.no_grad()
def test_every_call_has_outputs_of_its_own(engine: str) -> None:
    model = Net(both)
    run = prepared(engine, model, X)
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
def test_outputs_are_made_while_the_call_before_computes(engine: str) -> None:
    run = prepared(engine, Net(both), X)
    called(run, X)
    wait_until_ready(run)
    ready = run.ready._waiting[0]
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
def test_inputs_may_lie_anyhow(engine: str, name: str) -> None:
    model = Net(both)
    run = prepared(engine, model, X)
    for _ in range(3):
        x = ODD[name]()
        torch.testing.assert_close(called(run, x)[0], model(x)[0])


@torch.no_grad()
def test_an_input_among_the_outputs_is_that_of_the_call(engine: str) -> None:
    model = Net(lambda x, hidden: {"given": x, "hidden": hidden, "again": hidden})
    run = prepared(engine, model, X)
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
def test_other_outputs_of_onnx_runtime_are_made_after_the_call(output: Any) -> None:
    pytest.importorskip("onnxruntime")
    model = Net(output)
    run = prepared("onnxruntime", model, X)
    assert run.ready is None and run.hides_looks_from is not None
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(called(run, x), model(x))


@torch.no_grad()
def test_large_outputs_do_not_wait(engine: str) -> None:
    model = Net(lambda x, hidden: hidden.repeat(400, 400))
    run = prepared(engine, model, X)
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(called(run, x), model(x))
        time.sleep(0.01)
        assert run.ready is None or not run.ready._waiting


@pytest.mark.parametrize("fault", ["has another name for it", "writes nothing"])
def test_a_session_that_cannot_be_bound_is_asked_in_the_old_way(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    if fault == "writes nothing":
        monkeypatch.setattr(BoundSession, "run", lambda self, request: None)
    else:
        monkeypatch.setattr(BoundSession, "write_into", lambda self, request, results: request.bind_somehow())
    model = Net(both)
    run = prepared("onnxruntime", model, X)
    assert run.ready is None
    with torch.no_grad():
        torch.testing.assert_close(called(run, X)[0], model(X)[0])


@torch.no_grad()
def test_a_call_that_fails_leaves_nothing_behind(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net(both)
    run = prepared(engine, model, X)

    def fails(self: Any, request: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as broken, pytest.raises(RuntimeError, match="out of memory"):
        broken.setattr(type(run.ready._session), "run", fails)
        called(run, X)
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(called(run, x)[0], model(x)[0])


@torch.no_grad()
def test_calls_in_many_threads_get_their_own(engine: str) -> None:
    model = Net(both)
    run, reference = prepared(engine, model, X), copy.deepcopy(model)
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
    assert len(run.ready._waiting) <= 1


def test_in_inference_mode_and_on_another_default_device(engine: str) -> None:
    model = Net(both)
    run = prepared(engine, model, X)
    with torch.inference_mode(), torch.device("meta"):
        outputs = [called(run, X) for _ in range(3)]
    assert all(output[0].device.type == "cpu" for output in outputs)
    with torch.no_grad():
        torch.testing.assert_close(outputs[-1][0], model(X)[0])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float64, torch.float16, torch.uint8])
@torch.no_grad()
def test_types(engine: str, dtype: torch.dtype) -> None:
    class Cast(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.float() + 1, (x.float() > 0).to(dtype)

    x = torch.tensor([[0, 1, 1], [1, 0, 0]]).to(dtype)
    run = prepared(engine, Cast(), x)
    assert run.ready is not None
    for given in (x, x.flip(0)):
        for mine, its in zip(called(run, given), Cast()(given), strict=True):
            assert mine.dtype == its.dtype and torch.equal(mine, its)
