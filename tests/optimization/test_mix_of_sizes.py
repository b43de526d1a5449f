"""What runs calls of other sizes than the example's is chosen on a mix of sizes, with the original among the ways."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import refold
from refold import RemovePadding
from refold.examples.padded_batches import PaddedEncoder
from refold.executors import Plain, catalogue
from refold.optimization import choice
from refold.optimization.choice import ORIGINAL
from refold.patterns.packing.dense_graph import leaves_padding_out, with_padding

ROWS, PAUSE = 4, 0.02


class Waiting(nn.Module):
    """Waits in its own code, which no graph of it does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE)
        return self.layer(x)


class Timed(Plain):
    """Takes any size: so long for the example's, and so long for others."""

    def __init__(self, name: str, at_example: float, elsewhere: float) -> None:
        self.name, self.at_example, self.elsewhere = name, at_example, elsewhere

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        def run(x: torch.Tensor) -> torch.Tensor:
            time.sleep(self.at_example if x.shape[0] == ROWS else self.elsewhere)
            return module(x)

        return run


MOODY, STEADY = Timed("moody", PAUSE / 8, 3 * PAUSE), Timed("steady", PAUSE / 2, PAUSE / 2)


@pytest.fixture(autouse=True)
def short_races(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_seconds", lambda _job: 0.4)


@pytest.mark.parametrize(("ways", "elsewhere"), [((MOODY,), ORIGINAL), ((MOODY, STEADY), "steady")])
def test_the_choice_holds_for_the_mix(ways: tuple[Timed, ...], elsewhere: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "BUILT_IN", ways)
    model = Waiting().eval()
    fast = refold.optimize(model, (torch.randn(ROWS, 8),), pipeline=[], progress=False, time_budget=60)
    assert fast.prepared.at_example.executor == "moody"
    assert fast.prepared.at_any_size.executor == elsewhere
    x = torch.randn(ROWS + 3, 8)
    with torch.no_grad():
        assert torch.equal(fast(x), model(x)) and not fast.fallbacks


def test_what_is_as_fast_at_any_size_serves_the_example_too(monkeypatch: pytest.MonkeyPatch) -> None:
    one_size = Timed("one size", PAUSE / 8, PAUSE / 8)
    one_size.takes_any_size = False
    level = Timed("any size", PAUSE / 8, PAUSE / 8)
    monkeypatch.setattr(catalogue, "BUILT_IN", (one_size, level))
    fast = refold.optimize(Waiting().eval(), (torch.randn(ROWS, 8),), pipeline=[], progress=False, time_budget=60)
    assert fast.prepared.at_example is fast.prepared.at_any_size


class Engine(Plain):
    """Knows no operator of packed graphs."""

    name, takes_packed = "engine", False
    given: GraphModule

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        assert isinstance(module, GraphModule)
        self.given = module
        return super().prepare(module, args, kwargs)


def test_engines_are_given_the_graph_with_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    monkeypatch.setattr(catalogue, "BUILT_IN", (Plain(), engine))
    model, ids = PaddedEncoder("mean").eval(), torch.randint(0, 16, (3, 8))
    model.positions = nn.Embedding(64, 8)
    mask = (torch.arange(8) < torch.tensor([8, 3, 4])[:, None]).long()
    fast = refold.optimize(model, (ids, mask), pipeline=[RemovePadding()], backend="engine", progress=False)
    assert not leaves_padding_out(engine.given)
    packed = RemovePadding()(refold.trace(model, ids, mask))
    dense = with_padding(packed)
    assert leaves_padding_out(packed) and not leaves_padding_out(dense) and with_padding(dense) is dense
    with torch.no_grad():
        torch.testing.assert_close(dense(ids, mask), packed(ids, mask))
        torch.testing.assert_close(fast(ids, mask), model(ids, mask))
