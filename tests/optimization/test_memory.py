"""Memory of ways to run a model: measured, told in the report, and bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import refold
from refold.errors import RefoldError
from refold.executors import Plain, catalogue
from refold.measurement.clock import used_memory
from refold.optimization.memory import Memory, as_bytes

MEGABYTES = 2**20


class Hoards(Plain):
    """Runs the module as it is, and holds a good deal more."""

    name = "hoards"

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        run = super().prepare(module, args, kwargs)
        hoard = torch.ones(64 * MEGABYTES // 4)
        return lambda *args, **kwargs: run(*args, **kwargs) if len(hoard) else None


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    if used_memory(torch.device("cpu")) is None:
        pytest.skip("this system does not tell the memory of a process")
    monkeypatch.setattr(catalogue, "BUILT_IN", (Plain(), Hoards()))
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()


def row_of(name: str, model: nn.Module) -> Any:
    """What the report says of the one way that was asked for."""
    report = refold.optimize(model, torch.randn(2, 8), pipeline=[], backend=name, effort="quick").report
    return next(row for row in report.executors if row.name == name)


def test_the_report_tells_what_each_way_holds_and_needs(model: nn.Module) -> None:
    hoarding, plain = row_of("hoards", model), row_of("plain", model)
    assert 60 * MEGABYTES < hoarding.resident < 80 * MEGABYTES and plain.resident < 8 * MEGABYTES
    assert hoarding.peak < 8 * MEGABYTES and plain.peak < 8 * MEGABYTES


def test_what_holds_more_than_the_bound_is_not_chosen(model: nn.Module) -> None:
    fast = refold.optimize(model, torch.randn(2, 8), pipeline=[], progress=False, time_budget=30, max_memory="32MB")
    found = {row.name: row for row in fast.report.executors}
    assert found["hoards"].choice == "not tried" and found["plain"].choice != "not tried"
    assert "it holds 64" in found["hoards"].why and "max_memory allows (30.5 MiB)" in found["hoards"].why
    with pytest.raises(RefoldError, match="the executor hoards cannot run this model: it holds"):
        refold.optimize(model, torch.randn(2, 8), pipeline=[], backend="hoards", max_memory=32 * MEGABYTES)


@pytest.mark.parametrize(
    ("given", "meant"),
    [(None, None), (0, 0), (5, 5), ("5", 5), ("2GB", 2 * 10**9), ("1.5 kib", 1536), (" 3 MiB ", 3 * 2**20)],
)
def test_a_bound_is_bytes_or_has_a_unit(given: Any, meant: int | None) -> None:
    assert as_bytes(given) == meant


@pytest.mark.parametrize("given", ["much", "2 GBit", "-1", -1, True, 1.5, ""])
def test_another_bound_is_refused(given: Any) -> None:
    with pytest.raises(RefoldError, match="max_memory must be a number of bytes, or one with a unit such as '2GB'"):
        refold.optimize(nn.ReLU(), torch.ones(2), max_memory=given)


def test_what_is_not_known_is_not_above_a_bound() -> None:
    assert Memory().why_above(0) is None and Memory(3, 4).why_above(None) is None and Memory(3, 4).why_above(7) is None
    assert (
        Memory(3, 4).why_above(6)
        == "it holds 3 bytes and needs 4 bytes during a call, more than max_memory allows (6 bytes)"
    )
