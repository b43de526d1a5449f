"""A job that is stopped half-way leaves the model as it was: objects, memory, values, and what surrounds calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import refold
from refold.optimization import variants
from refold.optimization.optimized_module import OptimizedModule
from refold.testing.faults import Fault
from refold.testing.model_faults import ModelFacts, check_job_faults, every_line

X = torch.randn(3, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.last = (nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = (self.query(x) @ self.key(x).T).softmax(-1) @ self.value(x)
        return self.norm(self.last(x)) + mixed / 4


def optimized(model: nn.Module) -> OptimizedModule:
    return refold.optimize(model, (X,), backend="plain", progress=False)


@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
def test_a_fault_in_optimize_leaves_no_trace(error: type[BaseException]) -> None:
    model = Net().eval()
    faults = check_job_faults(
        lambda: optimized(model), model, lambda lines: every_line(lines, 6), error, OptimizedModule.restore
    )
    assert list(faults) == []


@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
def test_a_fault_in_trace_leaves_no_trace(error: type[BaseException]) -> None:
    model = Net().eval()
    faults = check_job_faults(lambda: refold.trace(model, X), model, lambda lines: every_line(lines, 20), error)
    assert list(faults) == []


def test_interrupted_when_weights_were_merged() -> None:
    model = Net().eval()
    before, lay = ModelFacts.of(model), model.query.weight.untyped_storage().nbytes()
    merged = []

    def report(what: str, done: float) -> None:
        merged.append(model.query.weight.untyped_storage().nbytes() > lay)
        if what == "timing the executors":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        refold.optimize(model, (X,), backend="plain", progress=report)
    assert merged[-1], "they lay in the merged weight"
    assert before.differences(ModelFacts.of(model)) == []


def test_a_restore_that_was_interrupted_can_be_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net().eval()
    fast = optimized(model)

    def stop(*_args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(variants, "undo_below", stop)
        fast.restore()
    assert fast.restore() is model
    assert model.query.weight.untyped_storage().nbytes() == model.query.weight.nbytes


def test_a_fault_in_save_and_load_leaves_no_trace(tmp_path: Path) -> None:
    model = Net().eval()
    gm = refold.MergeLinears()(refold.trace(model, X))

    def job() -> object:
        refold.save(gm, tmp_path / "saved")
        return refold.load(tmp_path / "saved", model)

    faults = [*check_job_faults(job, model, lambda lines: every_line(lines, 12), KeyboardInterrupt)]
    faults += check_job_faults(job, gm, lambda lines: every_line(lines, 12))
    assert faults == []
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert torch.equal(refold.load(tmp_path / "saved", model)(X), gm(X))
