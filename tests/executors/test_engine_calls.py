"""The outputs of an engine are those of that call, and of no other, however the inputs lie in memory."""

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

from refold.executors import Checked, executor_named

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


@pytest.fixture(scope="module", params=[pytest.param(e, marks=pytest.mark.slow) for e in ("onnxruntime", "openvino")])
def engine(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return str(request.param)


def prepared(engine: str, model: nn.Module, *args: Any) -> Any:
    run = executor_named(engine).prepare(model.eval(), args, {})
    assert isinstance(run, Checked)
    return run


@pytest.fixture(scope="module")
def net(engine: str) -> tuple[nn.Module, Any]:
    """A model, and how an engine runs it: prepared once, called in all of these ways."""
    model = Net(both)
    with torch.no_grad():
        return model, prepared(engine, model, X)


def called(run: Any, *tensors: torch.Tensor) -> Any:
    return run.run_checked(list(tensors), tensors, {})


@torch.no_grad()
def test_every_call_has_outputs_of_its_own(net: tuple[nn.Module, Any]) -> None:
    model, run = net
    inputs = [torch.randn(3, 4) for _ in range(20)]
    outputs = [called(run, x) for x in inputs]
    for x, output in zip(inputs, outputs, strict=True):
        expected = model(x)
        assert type(output) is type(expected) and list(output) == list(expected)
        torch.testing.assert_close(output.last_hidden_state, expected.last_hidden_state)
        torch.testing.assert_close(output[1], expected[1])
    assert len({tensor.data_ptr() for output in outputs for tensor in output.values()}) == 40


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
def test_inputs_may_lie_anyhow(net: tuple[nn.Module, Any], name: str) -> None:
    model, run = net
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
def test_outputs_of_odd_sizes(output: Any) -> None:
    pytest.importorskip("onnxruntime")
    model = Net(output)
    run = prepared("onnxruntime", model, X)
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(called(run, x), model(x))


@torch.no_grad()
def test_a_call_that_fails_leaves_nothing_behind(net: tuple[nn.Module, Any]) -> None:
    model, run = net
    with pytest.raises(Exception, match=r"."):  # each engine has a class of its own
        called(run, torch.randn(3, 5, dtype=torch.float64))
    for _ in range(3):
        x = torch.randn(3, 4)
        torch.testing.assert_close(called(run, x)[0], model(x)[0])


@torch.no_grad()
def test_calls_in_many_threads_get_their_own(net: tuple[nn.Module, Any]) -> None:
    model, run = net
    reference = copy.deepcopy(model)
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


def test_in_inference_mode_and_on_another_default_device(net: tuple[nn.Module, Any]) -> None:
    model, run = net
    with torch.inference_mode(), torch.device("meta"):
        outputs = [called(run, X) for _ in range(3)]
    assert all(output[0].device.type == "cpu" for output in outputs)
    with torch.no_grad():
        torch.testing.assert_close(outputs[-1][0], model(X)[0])


DTYPES = [torch.int64, torch.int32, torch.bool, torch.float64, torch.float16, torch.uint8]


class Casts(nn.Module):
    """An input of each type, computed with as floats and cast back."""

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return [result for x in tensors for result in (x.float() + 1, (x.float() > 0).to(x.dtype))]


@torch.no_grad()
def test_types(engine: str) -> None:
    inputs = [torch.tensor([[0, 1, 1], [1, 0, 0]]).to(dtype) for dtype in DTYPES]
    run = prepared(engine, Casts(), *inputs)
    for given in (inputs, [x.flip(0) for x in inputs]):
        expected = Casts()(*given)
        assert len(expected) == 2 * len(DTYPES)
        for mine, its in zip(called(run, *given), expected, strict=True):
            assert mine.dtype == its.dtype and torch.equal(mine, its)
