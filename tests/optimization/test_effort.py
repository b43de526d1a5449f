"""What is tried with how much effort, and what is left out for want of time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import refold
from refold import FoldConstants
from refold.errors import FellBack
from refold.executors import Executor, Plain, catalogue, executor_named
from refold.optimization import steps
from refold.optimization.budget import Budget
from refold.optimization.default_pipeline import default_pipeline, usual_for
from refold.optimization.expectations import expected_of, most_promising_first, why_not_in_time
from refold.optimization.job_stages import optimize
from refold.rewrite.transformation import ReversibleTransformation


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x) + self.second(x)))


class RelativeScores(nn.Module):
    """Scores against a table that is projected in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.project, self.query = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.query(x) @ self.project(self.table.weight).T


X = torch.randn(3, 8)


def test_quick_verifies_every_site_and_runs_the_plain_graph() -> None:
    report = optimize(Net().eval(), (X,), effort="quick", progress=False).report
    assert {row.name for row in report.executors if row.choice != "not tried"} == {"plain"}
    merged = next(step for step in report.steps if step.name == "MergeLinears")
    assert merged.status == "kept" and merged.verification is not None and merged.verification.ok and not merged.gain
    left_out = {row.name: row.why for row in report.executors if row.choice == "not tried"}
    assert "effort='default'" in left_out["compile-freezing"]


class Waits(ReversibleTransformation):
    """Computes the same, but takes its time."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        node = next(n for n in graph_module.graph.nodes if n.op not in ("placeholder", "get_attr"))
        with graph_module.graph.inserting_before(node):
            graph_module.graph.call_function(wait)
        return graph_module


def wait() -> None:
    time.sleep(0.002)


def test_only_the_rewrite_that_is_slower_is_taken_back() -> None:
    pipeline = [Waits(), refold.MergeLinears()]
    report = optimize(Net().eval(), (X,), backend="plain", pipeline=pipeline, progress=False).report
    assert [step.status for step in report.steps] == ["taken back", "kept"]
    assert any(note.startswith("All rewrites together") for note in report.notes)


def test_rewrites_that_are_faster_together_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_with_measurements", lambda *_: pytest.fail("they were measured one by one"))
    monkeypatch.setattr(steps, "_measured", lambda job, before, after: measured_faster())
    pipeline = [refold.RemoveNoOps(), refold.MergeLinears()]
    report = optimize(Net().eval(), (X,), backend="plain", pipeline=pipeline, progress=False).report
    assert report.steps[1].status == "kept"


def measured_faster() -> Any:
    from refold.measurement.timing import Measurement, Timing

    return Measurement(Timing("a", (2.0,) * 20, 2.0), Timing("b", (1.0,) * 20, 1.0), "cpu", 1)


def test_what_is_not_expected_to_fit_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Plain):
        name = "compile-freezing-autotune"

        def prepare(self, *_: Any) -> Callable[..., Any]:
            raise AssertionError("it was begun")

    monkeypatch.setattr(catalogue, "BUILT_IN", (Plain(), Slow()))
    report = optimize(Net().eval(), (X,), time_budget=20, progress=False).report
    why = {row.name: row.why for row in report.executors}["compile-freezing-autotune"]
    assert "preparing it takes about" in why and "of the time budget are left" in why


def test_the_most_promising_come_first() -> None:
    found: list[Executor] = [executor_named(name) for name in ("compile-freezing", "openvino", "onnxruntime", "plain")]
    assert [e.name for e in most_promising_first(found, 4.0)] == [
        "plain",
        "openvino",
        "onnxruntime",
        "compile-freezing",
    ]
    assert expected_of(executor_named("openvino")).preparing(4.0) < 30
    assert why_not_in_time(executor_named("openvino"), Budget(float("inf"))) is None


def test_budgets() -> None:
    cpu, cuda, small = torch.device("cpu"), torch.device("cuda"), Net()
    with torch.device("meta"):
        large = nn.Linear(30_000, 20_000)
    assert Budget.usual(small, cpu, "default").seconds == 30 and Budget.usual(small, cuda, "quick").seconds == 60
    assert Budget.usual(large, cpu, "default").seconds == 60 and Budget.usual(large, cuda, "default").seconds == 120
    assert Budget.usual(large, cuda, "max").seconds is None


def test_for_inference_what_depends_on_weights_alone_is_computed_once() -> None:
    usual = usual_for(default_pipeline(), torch.device("cuda"), "quick")
    assert FoldConstants(parameters=True) in usual and FoldConstants() not in usual
    assert len(usual) == len(default_pipeline())


def test_on_a_gpu_packed_batches_are_not_for_the_plain_graph() -> None:
    usual = usual_for(default_pipeline(), torch.device("cuda"), "quick")
    everything = usual_for(default_pipeline(), torch.device("cpu"), "quick")
    assert [type(t).__name__ for t in everything if t not in usual] == ["RemovePadding"]
    for effort in ("default", "max"):
        assert usual_for(default_pipeline(), torch.device("cuda"), effort) == everything


def test_a_table_that_is_made_from_weights_is_made_once_and_follows_them() -> None:
    model = RelativeScores().eval()
    x = torch.randn(3, 5, 16)
    fast = refold.optimize(model, (x,), backend="plain", effort="quick", progress=False)
    assert [step.name for step in fast.report.kept] == ["FoldConstants"]
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(fast(x), expected) and not fast.fallbacks
        model.project.weight.mul_(3)
        with pytest.warns(FellBack, match="weights of the original were changed"):
            assert torch.equal(fast(x), model(x)) and not torch.equal(fast(x), expected)
        assert fast.refresh()
        before = fast.report.calls.original
        assert torch.equal(fast(x), model(x)) and fast.report.calls.original == before
    assert fast.restore() is model
