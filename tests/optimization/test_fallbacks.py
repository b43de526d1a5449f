"""Calls that nothing was prepared for: counted, told once for each reason, refused, or ignored."""

from __future__ import annotations

import logging
import threading
import warnings

import pytest
import torch
from torch import nn

import refold
from refold.errors import FellBack, RefoldError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.a(x) * self.b(x) * scale


X = torch.randn(3, 6)


def fast(**settings: object) -> refold.optimization.optimized_module.OptimizedModule:
    torch.manual_seed(0)
    return refold.optimize(Net().eval(), (X,), backend="plain", progress=False, **settings)


def test_a_fallback_is_told_once_for_each_reason_where_it_happens(caplog: pytest.LogCaptureFixture) -> None:
    model = fast()
    with warnings.catch_warnings(record=True) as told, caplog.at_level(logging.INFO, "refold"):
        warnings.simplefilter("always")
        for scale in (2.0, 3.0, 4.0):
            assert torch.equal(model(X, scale), model.original(X, scale))
        assert torch.equal(model(X.double().float().int().float()[:, :6]), model(X.int().float()))
        model.train()
        model(X)
        model.eval()
        model(X)
    (about_scale,) = [w for w in told if issubclass(w.category, FellBack)]
    assert "on_fallback='ignore'" in str(about_scale.message) and about_scale.filename == __file__
    calls = model.report.calls
    assert calls is not None and (calls.fast, calls.original) == (3, 4)
    assert [count for _, count in calls.reasons] == [3, 1] and calls.reasons[1][0] == "the model is in training mode"
    assert len([record for record in caplog.records if record.name == "refold"]) == 1
    assert "3 ran the fast way, 4 the original: 3 because" in str(model.report)


def test_a_fallback_is_refused_or_ignored() -> None:
    strict, silent = fast(on_fallback="raise"), fast(on_fallback="ignore")
    with pytest.raises(FellBack, match=r"did not run: .*scale"):
        strict(X, 2.0)
    assert issubclass(FellBack, RefoldError)
    assert torch.equal(strict(X), silent(X))
    restored = strict.restore()
    assert torch.equal(strict(X, 2.0), restored(X, 2.0)), "what was restored is asked for"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        silent(X, 2.0)
    assert silent.report.calls.original == 1
    with pytest.raises(RefoldError, match="on_fallback must be one of warn, raise, ignore, not 'log'"):
        fast(on_fallback="log")


def test_a_model_that_is_moved_or_changed_says_that_the_fast_way_is_gone() -> None:
    model = fast()
    with pytest.warns(FellBack, match="moved or cast since it was optimized") as told:
        model.to(torch.float64)
    assert [w.filename for w in told if issubclass(w.category, FellBack)] == [__file__]
    assert model(X.double()).dtype == torch.float64
    other = fast()
    with pytest.warns(FellBack, match="a was set since it was optimized"):
        other.a = nn.Linear(6, 4)
    changed = fast(pipeline=[])
    with torch.no_grad():
        changed.original.a.weight = nn.Parameter(torch.zeros(4, 6))
        with pytest.warns(FellBack, match=r"replaced since it was optimized\. Call \.refresh"):
            assert torch.equal(changed(X), changed.original(X))


def test_every_call_of_every_thread_is_counted() -> None:
    model = fast(on_fallback="ignore")

    def work() -> None:
        for i in range(50):
            model(X, 1.0 if i % 2 else 2.0)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls = model.report.calls
    assert calls is not None and (calls.fast, calls.original) == (200, 200)
