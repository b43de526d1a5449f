"""Models on the meta device: captured, rewritten, explained and undone as those with weights are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import refold
from refold.errors import CaptureError
from refold.rewrite.registry import registered
from refold.rewrite.rule import Rewrite
from refold.testing.laws import graph_of

RULES = sorted({c for c in registered() if c.__module__.startswith("refold.")}, key=lambda c: c.__name__)

TRIES_VALUES = ("RemovePadding",)
"""Rules that run parts of the model to see what is in their results."""


class Gated(nn.Module):
    def __init__(self, reads_values: bool = False) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.register_buffer("calls", torch.zeros(1))
        self.reads_values = reads_values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reads_values and not torch.compiler.is_compiling() and bool(x.sum() > 1e9):
            return x
        return self.down(self.gate(x).sigmoid() * self.up(x))


def on_meta(reads_values: bool = False) -> Gated:
    with torch.device("meta"):
        return Gated(reads_values).eval()


def test_a_model_without_weights_is_captured_as_one_with_weights() -> None:
    real = refold.trace(Gated().eval(), torch.randn(2, 8))
    gm = refold.trace(on_meta(), torch.randn(2, 8))  # inputs need not be on the meta device
    assert gm.code == real.code
    assert gm(torch.empty(3, 8, device="meta")).shape == (3, 8)
    report = str(refold.capture_report(gm))
    assert "shapes and dtypes alone were compared, on the example" in report and "bit for bit on nothing" in report


def test_a_model_that_reads_values_in_python_is_captured_and_the_report_says_what_was_not_compared() -> None:
    gm = refold.trace(on_meta(reads_values=True), torch.empty(2, 8, device="meta"))
    assert any("only while it was exported" in note for note in refold.capture_report(gm).notes)


def test_a_model_that_cannot_run_is_refused_there_too() -> None:
    with pytest.raises(CaptureError, match=r"mat1 and mat2|size"):
        refold.trace(on_meta(), torch.empty(2, 7, device="meta"))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_rule_works_without_weights(rule: type[Rewrite]) -> None:
    fired = 0
    for model, _inputs in rule().examples():
        gm = graph_of(model)
        meta = copy.deepcopy(gm).to("meta")
        code = meta.code
        real = rule()(copy.deepcopy(gm))
        again = rule()(meta)
        if not refold.history(again):
            assert refold.result(again).refused  # it depends on numbers that are not there, and says so
            continue
        fired += 1
        assert again.code == real.code
        assert {n: t.shape for n, t in again.state_dict().items()} == {n: t.shape for n, t in real.state_dict().items()}
        if all(record.map.operation.structural for change in refold.history(real) for record in change.maps):
            assert refold.plan(again).maps == refold.plan(real).maps
        refold.undo(again, None)
        assert again.code == code
    assert fired or rule.__name__ in TRIES_VALUES
