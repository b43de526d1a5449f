"""A model that changes its own state from call to call is run as it is, and the report says what it changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import refold
from refold.errors import RefoldError

X = torch.randn(2, 4)


class Stateful(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.calls, self.seen = kind, nn.Linear(4, 4), 0, []
        self.register_buffer("kept", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        if self.kind == "counter":
            self.calls += 1
            return y + self.calls
        if self.kind == "list":
            self.seen.append(x.sum())
            return y + len(self.seen)
        if self.kind == "written buffer":
            self.kept.copy_(y)
        else:
            self.kept = y.detach()
        return y


@pytest.mark.parametrize("kind", ["counter", "list", "written buffer", "replaced buffer"])
def test_state_goes_on_as_in_the_model(kind: str) -> None:
    model = Stateful(kind).eval()
    other, fast = copy.deepcopy(model), refold.optimize(model, (X,), time_budget=5, progress=False)
    assert any("changes its own state" in note for note in fast.report.notes)
    with torch.no_grad():
        for factor in range(3):
            assert torch.equal(fast(X * factor), other(X * factor))
            assert torch.equal(fast.kept, other.kept) and fast.calls == other.calls and fast.seen == other.seen
    with pytest.raises(RefoldError, match="changes its own state"):
        refold.optimize(model, (X,), backend="compile", progress=False)


class Lazy(nn.Module):
    """Makes a table once, at the first call."""

    table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(4.0)
        return x + self.table


def test_what_the_first_call_makes_for_good_is_no_state() -> None:
    fast = refold.optimize(Lazy().eval(), (X,), backend="plain", progress=False)
    assert not any("changes its own state" in note for note in fast.report.notes)
