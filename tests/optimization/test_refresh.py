"""What no check at a call can see is seen by `refresh`, and prepared anew."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from refold.optimization.job_stages import optimize
from refold.transformations.fold_constants import FoldConstants

X = torch.randn(3, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.table, self.temperature = torch.randn(8), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x) + self.second(x) * 3) / self.temperature + self.table


def set_temperature(model: Net) -> None:
    model.temperature = 5.0


def write_table(model: Net) -> None:
    model.table.mul_(3)


def set_eps(model: Net) -> None:
    model.norm.eps = 0.5


def write_through_data(model: Net) -> None:
    model.first.weight.data.mul_(3)


def add_hook(model: Net) -> None:
    model.second.register_forward_hook(lambda module, args, output: output + 1)


def same(fast: nn.Module, model: nn.Module) -> bool:
    reference = copy.deepcopy(model)
    with torch.no_grad():
        mine, its = fast(X), reference(X)
    return bool((mine - its).abs().max() <= 1e-5 * its.abs().max())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_temperature, "the graph"),
        (write_table, "values of"),
        (set_eps, ""),
        (add_hook, "hook"),
    ],
)
def test_what_has_changed_is_said_and_prepared_anew(change: Callable[[Net], None], words: str) -> None:
    model = Net().eval()
    fast = optimize(model, (X,), backend="plain", effort="quick", progress=False)
    assert fast.refresh() == [] and same(fast, model)
    change(model)
    changes = fast.refresh()
    assert changes and words in " ".join(changes)
    fast.notes.clear()
    assert same(fast, model) and not fast.notes and fast.refresh() == []


def test_copies_of_weights_are_compared_bit_for_bit() -> None:
    pytest.importorskip("onnxruntime")
    model = Net().eval()
    fast: Any = optimize(model, (X,), backend="onnxruntime", progress=False)
    write_through_data(model)
    assert not same(fast, model), "no check at a call can see this"
    assert "values of changed: first.weight" in fast.refresh()[0]
    assert same(fast, model) and fast.prepared.at_example.executor == "onnxruntime"


def test_what_was_restored_is_prepared_again() -> None:
    model = Net().eval()
    fast = optimize(model, (X,), backend="plain", effort="quick", progress=False)
    fast.restore()
    assert "restored" in fast.refresh()[0] and fast.prepared is not None and same(fast, model)


class Tables(nn.Module):
    """A table that is projected by weights alone, in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.project, self.out = nn.Parameter(torch.randn(5, 8)), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x) @ self.project(self.table).t()


def test_what_weights_alone_decide_is_computed_again_when_they_change() -> None:
    torch.manual_seed(0)
    model, x = Tables().eval(), torch.randn(3, 8)
    fold = FoldConstants(parameters=True)
    fast = optimize(model, x, backend="plain", pipeline=fold, on_fallback="ignore", progress=False)
    assert any(step.name == "FoldConstants" and step.status == "kept" for step in fast.report.steps)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
            assert torch.equal(fast(x), model(x)), "the change was noticed at the call"
            assert fast.refresh()
            assert torch.equal(fast(x), model(x))
        model.table.mul_(2)
        expected = model(x)
        assert fast.restore() is model
        assert torch.equal(model(x), expected)


class Normed(nn.Module):
    """Its batch norm is folded: what is prepared holds copies of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.first(x)) * self.second(x)).squeeze(-1)


def test_a_model_that_is_trained_is_evaluated_between_epochs() -> None:
    torch.manual_seed(0)
    model, x, y = Normed(), torch.randn(64, 8), torch.randn(64)
    alone = copy.deepcopy(model)
    fast = optimize(model.eval(), (x[:4],), backend="plain", progress=False)
    kept, timed = [step.name for step in fast.report.steps if step.status == "kept"], fast.report.timings
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, alone)]
    for epoch in range(2):
        for each, optimizer in zip((model, alone), optimizers, strict=True):
            each.train()
            for rows, wanted in zip(x.split(32), y.split(32), strict=True):
                optimizer.zero_grad()
                (each(rows) - wanted).square().mean().backward()
                optimizer.step()
            each.eval()
        assert fast.refresh(), "weights that were folded have changed"
        with torch.no_grad():
            assert torch.allclose(fast(x), alone(x), atol=1e-5)
        assert fast.report.calls.fast == epoch + 1 and fast.report.calls.original == 0
    assert [step.name for step in fast.report.steps if step.status == "kept"] == kept
    assert timed and fast.report.timings == timed, "nothing was timed again"
    assert fast.restore() is model
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in alone.state_dict().items())
