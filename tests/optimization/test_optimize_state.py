"""Optimizing leaves the model and the example as they were, and what comes out heeds state, values and modes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from refold import optimize
from refold.errors import RefoldError

X = torch.randn(3, 4)


def built(model: nn.Module, *example: Any, backend: str = "plain") -> Any:
    return optimize(model.eval(), example, backend=backend, time_budget=20, progress=False)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("hidden", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.hidden = torch.tanh(self.linear(x).mean(0) + self.hidden)
        return self.norm(self.linear(x)) + self.hidden


def test_the_state_of_the_model_is_what_it_was() -> None:
    model = Stateful().eval()
    model.norm.train()
    before, buffers = copy.deepcopy(model.state_dict()), dict(model.named_buffers())
    fast = optimize(model, (X,), time_budget=10, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert fast.restore() is model and model.norm.training


def test_state_goes_on_from_call_to_call() -> None:
    model = Stateful().eval()
    other, fast = copy.deepcopy(model), built(model, X)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(X), other(X))
    torch.testing.assert_close(dict(model.named_buffers()), dict(other.named_buffers()))


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) + 1


def test_the_example_is_what_it_was() -> None:
    example = X.clone()
    fast = built(InPlace(), example)
    assert torch.equal(example, X)
    assert torch.equal(fast(example), 2 * X + 1) and torch.equal(example, 2 * X)


class Batch(nn.Module):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch["doubled"] = batch["x"] * 2
        return batch["doubled"] + 1


def test_a_model_that_fills_its_arguments_is_run_as_it_is() -> None:
    example = {"x": X}
    fast = optimize(Batch().eval(), (example,), progress=False)
    assert list(example) == ["x"] and any("dicts or lists" in note for note in fast.report.notes)
    given = {"x": X + 1}
    assert torch.equal(fast(given), given["x"] * 2 + 1) and torch.equal(given["doubled"], given["x"] * 2)
    with pytest.raises(RefoldError, match="dicts or lists"):
        built(Batch(), example)


class Steered(nn.Module):
    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        for _ in range(int(times)):
            x = x + torch.sin(x)
        return x


@pytest.mark.parametrize("backend", ["plain", "compile"])
def test_other_values_that_control_flow_depends_on_run_the_original(backend: str) -> None:
    model = Steered()
    fast = built(model, X, torch.tensor(2), backend=backend)
    torch.testing.assert_close(fast(X, torch.tensor(2)), model(X, torch.tensor(2)))
    assert not any("ran the original" in note for note in fast.report.notes)
    assert torch.equal(fast(X, torch.tensor(3)), model(X, torch.tensor(3)))
    assert any("control flow depends" in note for note in fast.report.notes)


def test_models_that_are_optimized_in_inference_mode_can_be_trained() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    with torch.inference_mode():
        fast = built(model, X.clone())
        torch.testing.assert_close(fast(X), model(X))
    assert not any(weight.is_inference() for weight in model.parameters())
    fast.train()(X).sum().backward()
    assert model[0].weight.grad is not None


def test_torchscript_is_refused_in_a_sentence() -> None:
    with pytest.raises(RefoldError, match="TorchScript"):
        built(torch.jit.trace(nn.Linear(4, 4).eval(), X), X)
