"""Which strategy captures a model, what capture leaves untouched, how it fails, and partial capture."""

from __future__ import annotations

import copy
import io
import logging
import threading
from typing import Any

import pytest
import torch
from capture_models import Block, seeded
from torch import nn

from refold.capture.tracing import (
    capture_report,
    captured_parts,
    trace,
)
from refold.errors import CaptureError


class Counting(nn.Module):
    """Plants attributes, keeps a dict, counts in a buffer, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.seen: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cached = self.linear(x)
        self.seen.setdefault(x.shape[1], torch.arange(x.shape[1]))
        self.calls.add_(1)
        return self.cached + torch.rand_like(x) + self.seen[x.shape[1]]


def test_the_model_and_the_random_state_are_as_before() -> None:
    model = Counting().eval()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    captured = trace(model, seeded(2, 4))
    assert torch.equal(torch.rand(3), expected)
    assert not hasattr(model, "cached") and model.seen == {} and model.calls == 0
    assert capture_report(captured).notes == ("calls of the model set cached, those of the graph do not",)
    captured(seeded(2, 4))
    assert model.calls == 1, "what the graph writes, it writes into the model's own buffer"


class CastsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear = self.linear.to(torch.float32)
        return self.linear(x)


def test_a_cast_that_changes_nothing_is_no_obstacle() -> None:
    model = CastsItself().eval()
    captured = trace(model, seeded(2, 4))
    assert capture_report(captured).method == "torch.export"
    assert captured.linear is model.linear
    assert "to" not in vars(model.linear)


class DataDependent(nn.Module):
    """Control flow depends on a tensor's value; only its inner block can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.sum().item() > 1e6:
            return x
        return self.inner(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), DataDependent(), Block()])
        self.head = Block()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"y": self.head(x, scale=2.0)}


def test_a_failure_names_the_line_the_reason_and_what_to_try() -> None:
    with pytest.raises(CaptureError) as caught:
        trace(Model().eval(), seeded(2, 4))
    text = str(caught.value)
    assert "test_capture_strategies.py" in text and "if x.sum().item() > 1e6" in text
    assert "control flow depends on the value of a tensor" in text
    assert "on_failure='partial'" in text and "Also tried" in text


def test_partial_capture_takes_the_largest_parts() -> None:
    model = Model().eval()
    x = seeded(2, 4)
    shell = trace(model, x, on_failure="partial")
    parts = captured_parts(shell)
    assert list(parts) == ["layers.0", "layers.1.inner", "layers.2", "head"]
    assert isinstance(shell, Model) and type(model.head) is Block, "the eager model is not touched"
    assert list(shell.state_dict()) == list(model.state_dict())
    assert shell.head.linear.weight is model.head.linear.weight
    report = capture_report(shell)
    assert report.method == "partial" and report.parts == tuple(parts) and 0.8 < report.share < 1
    with torch.no_grad():
        expected = copy.deepcopy(model)(x)["y"]
        assert torch.equal(shell(x)["y"], expected)
        assert torch.equal(copy.deepcopy(shell)(x)["y"], expected)
    file = io.BytesIO()
    torch.save(shell, file)
    file.seek(0)
    assert capture_report(torch.load(file, weights_only=False)) == report


def test_one_submodule_on_what_the_model_gives_it() -> None:
    model = Model().eval()
    captured = trace(model, seeded(2, 4), submodule="layers.1.inner")
    assert capture_report(captured).raised == ("linear", "norm")
    with pytest.raises(CaptureError, match="no submodule 'tail'; it has layers, head"):
        trace(model, seeded(2, 4), submodule="tail")


def test_what_has_no_python_to_follow_is_a_sentence() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), seeded(2, 4)
    for scripted in (torch.jit.trace(model, x), torch.jit.freeze(torch.jit.script(model))):
        with pytest.raises(CaptureError, match="TorchScript module"):
            trace(scripted, x)
    holder = nn.Sequential(torch.jit.script(Block()), Block()).eval()
    assert list(captured_parts(trace(holder, x, on_failure="partial"))) == ["1"]
    nested = torch.nested.nested_tensor([seeded(2, 4), seeded(3, 4)])
    with pytest.raises(CaptureError, match="'input' is a nested tensor"):
        trace(model[0], nested)


def test_threads_take_turns() -> None:
    results: list[Any] = []

    def work() -> None:
        model = Block().eval()
        captured = trace(model, seeded(2, 4))
        results.append(torch.equal(captured(seeded(2, 4)), model(seeded(2, 4))))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 3


class MindsExport(nn.Module):
    """Runs other code while it is exported, which rounds otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if torch.compiler.is_exporting():
            return sum((y[:, i : i + 1] for i in range(6)), torch.zeros(1)) / 3
        return y.sum(1, keepdim=True) / 3


def test_a_model_that_runs_other_code_in_an_export_is_captured_as_its_calls_run() -> None:
    torch.manual_seed(0)
    model, x = MindsExport().eval(), seeded(64, 6)
    exported = torch.export.export(model, (x,)).module()
    with torch.no_grad():
        assert not torch.equal(exported(x), model(x)), "the two codes must differ for the test to say anything"
    before = torch.compiler.is_exporting
    captured = trace(model, x)
    assert torch.compiler.is_exporting is before
    report = capture_report(captured)
    assert report.method == "torch.export of what calls run"
    assert report.dynamic == {"x": (0,)}
    with torch.no_grad():
        assert torch.equal(captured(x), model(x)) and torch.equal(captured(x[:5]), model(x[:5]))


def test_what_export_and_calls_have_in_common_is_exported_plainly() -> None:
    report = capture_report(trace(nn.Linear(4, 4), seeded(2, 4)))
    assert report.method == "torch.export" and report.attempts == ()


class Untruthful(nn.ModuleList):
    """A model that is an empty container, and so counts as false."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@pytest.mark.parametrize("model", [Untruthful(), torch.compile(nn.Linear(4, 4)), torch.compile(nn.Sequential())])
def test_a_model_may_count_as_false(model: nn.Module) -> None:
    x = torch.randn(2, 4)
    captured = trace(model.eval(), x)
    with torch.no_grad():
        assert torch.equal(captured(x), model(x))


class Signed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


def test_attempts_that_fail_are_reported_by_the_error_alone(caplog: pytest.LogCaptureFixture) -> None:
    level = logging.getLogger("torch.fx.experimental.symbolic_shapes").level
    with pytest.raises(CaptureError, match="control flow depends"):
        trace(Signed(), torch.randn(2, 4))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert logging.getLogger("torch.fx.experimental.symbolic_shapes").level == level
