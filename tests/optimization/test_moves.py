"""A model that is moved or cast goes on with the same rewrites, and is what the moved original would be."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import refold
from refold.errors import FellBack
from refold.optimization.optimized_module import OptimizedModule

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "half and back": lambda model: model.half().float(),
    "device and dtype": lambda model: model.to("cpu", torch.float64),
    "as a part of another": lambda model: nn.Sequential(nn.Sequential(model)).double()[0][0],
}


class Net(nn.Module):
    """A dtype and a device are fixed in the graph of it, and weights are merged, folded and made constants."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.norm, self.table = nn.BatchNorm1d(16), nn.Parameter(torch.randn(4, 16))
        self.out = nn.Linear(16, 16)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.full((1,), 0.5, dtype=x.dtype, device=x.device)
        mixed = (self.query(x) @ self.key(x).transpose(-1, -2) * scale).softmax(-1) @ self.value(x)
        return self.norm(self.out(mixed.flatten(0, 1))) @ self.table.t()


def made() -> tuple[Any, nn.Module]:
    """An optimized model, and a copy of its original that shares nothing with it."""
    torch.manual_seed(0)
    model = Net().eval()
    alone = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FellBack)
        return refold.optimize(model, X, backend="plain", effort="quick", progress=False), alone


def rewrites(fast: Any) -> list[str]:
    return [type(change).__name__ + change.label for change in refold.record.stack.history(fast.graph_module)]


def same_bits(model: nn.Module, other: nn.Module) -> bool:
    mine, its = model.state_dict(), other.state_dict()
    same = all(torch.equal(mine[k], its[k]) and mine[k].dtype == its[k].dtype for k in its)
    alone = all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in mine.values())
    return list(mine) == list(its) and same and alone


@pytest.mark.parametrize("move", CASTS.values(), ids=list(CASTS))
def test_it_goes_on_with_the_same_rewrites(move: Callable[[nn.Module], nn.Module]) -> None:
    fast, alone = made()
    before = rewrites(fast)
    assert len(before) > 2
    with pytest.warns(FellBack, match=r"moved or cast since it was optimized: .*refresh") as told:
        assert move(fast) is fast
    assert {w.filename for w in told} == {__file__} and len(told) == 1, "once, where it happens"
    move(alone)
    weight = alone.out.weight
    x = X.to(weight.dtype)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", FellBack)
        found, expected = fast(x), alone(x)
        assert fast(x[:1]).shape[0] == 5
    assert found.dtype == weight.dtype and rewrites(fast) == before
    rounding = torch.finfo(weight.dtype).eps
    assert float((found - expected).abs().max()) <= 64 * rounding * float(expected.abs().max())
    assert (fast.report.calls.fast, fast.report.calls.original) == (2, 0)
    parameters = dict(fast.original.named_parameters())
    assert fast.restore() is fast.original and same_bits(fast.original, alone)
    assert all(parameter is parameters[name] for name, parameter in fast.original.named_parameters())


def test_it_is_restored_before_the_next_call_too() -> None:
    fast, alone = made()
    with pytest.warns(FellBack):
        fast.half()
    assert same_bits(fast.restore(), alone.half())
    assert fast.prepared is None
    x = X.half()
    assert torch.equal(fast(x), fast.original(x)) and fast.prepared is None, "what was restored stays so"


def test_a_move_to_where_it_is_makes_no_difference() -> None:
    fast, _ = made()
    prepared = fast.prepared
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast.to("cpu").float().to(torch.float32).cpu()
        nn.Sequential(fast).to("cpu")
    assert fast.prepared is prepared and fast.report.notes == prepared.report.notes


def test_refresh_prepares_the_rest() -> None:
    fast, _ = made()
    with pytest.warns(FellBack):
        fast.double()
    fast(X.double())
    assert fast.prepared.is_for_now
    assert fast.refresh() and not fast.prepared.is_for_now and fast.refresh() == []
    assert fast(X.double()).dtype == torch.float64


def test_an_original_that_was_moved_is_prepared_for_where_it_is() -> None:
    fast, _ = made()
    fast.original.double()
    assert fast.refresh()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FellBack)
        assert fast(X.double()).dtype == torch.float64


class OnlySingle(nn.Module):
    """A model whose code knows one dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise TypeError("single precision only")
        return self.a(x) + self.b(x)


def test_where_it_cannot_be_made_again_the_original_runs_and_why_is_said() -> None:
    fast: Any = refold.optimize(OnlySingle().eval(), X, backend="plain", effort="quick", progress=False)
    with pytest.warns(FellBack):
        fast.double()
    with pytest.warns(FellBack, match="single precision only"), pytest.raises(TypeError):
        fast(X.double())
    assert fast.prepared is None
    assert torch.equal(fast.float()(X), fast.original(X))


def test_training_and_calls_of_other_threads_run_the_original_meanwhile() -> None:
    fast, _ = made()
    with pytest.warns(FellBack):
        fast.double()
    fast.train()
    fast(X.double())
    assert fast.prepared is None
    fast.eval()
    x, found = X.double(), []
    threads = [threading.Thread(target=lambda: found.append(fast(x).detach())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert isinstance(fast, OptimizedModule) and fast.prepared.is_for_now
    assert len(found) == 4 and all(torch.allclose(each, found[0], rtol=1e-10) for each in found)
