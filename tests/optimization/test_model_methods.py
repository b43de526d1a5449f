"""Methods of a model that call the model run the fast way; others run as they are, and that is said once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import refold
from refold.errors import FellBack
from refold.optimization.model_methods import method_of

X = torch.randn(2, 5, 8)
QUICK = {"backend": "plain", "effort": "quick", "progress": False}


class Backbone(nn.Module):
    """It has the methods of a model of timm."""

    def __init__(self, pool: str = "avg") -> None:
        super().__init__()
        self.query, self.key, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.pool, self.last = pool, None

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return self.query(x) * self.key(x)

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        x = x.mean(1) if self.pool else x
        return x if pre_logits else self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(x))

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """The most likely class."""
        return self(x).argmax(-1)

    @torch.no_grad()
    def both(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.predict(x), self.predict(x.flip(0))

    def remember(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self(x)
        return self.last

    def again(self, x: torch.Tensor) -> torch.Tensor:
        return self.remember(x) + 1

    def describe(self) -> str:
        return f"{self.pool} of {len(list(self.parameters()))}"


class Loud(Backbone):
    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return super().predict(x) + 10


def made(kind: type[Backbone] = Backbone, **settings: Any) -> tuple[Any, Backbone]:
    torch.manual_seed(0)
    model = kind(**settings).eval()
    alone = copy.deepcopy(model)
    return refold.optimize(model, X, **QUICK), alone


CALLS: dict[str, Callable[[Any], Any]] = {
    "predict": lambda model: model.predict(X),
    "called by another": lambda model: model.both(X),
    "from a base class": lambda model: model.predict(x=X[:1]),
}


@pytest.mark.parametrize("name", CALLS)
def test_methods_that_call_the_model_run_the_fast_way(name: str) -> None:
    fast, alone = made(Loud if name == "from a base class" else Backbone)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FellBack)
        found, expected = CALLS[name](fast), CALLS[name](alone)
    pairs = zip(found, expected, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert fast.report.calls.fast == (2 if name == "called by another" else 1) and not fast.fallbacks
    assert fast.predict.__doc__ == alone.predict.__doc__ and fast.predict.__name__ == "predict"


@pytest.mark.parametrize("pool", ["avg", ""])
def test_methods_that_run_layers_by_themselves_are_right_and_say_so_once(pool: str) -> None:
    fast, alone = made(pool=pool)
    with pytest.warns(
        FellBack, match=r"forward_features runs at the speed of the original: it runs .* by itself"
    ) as told:
        features = fast.forward_features(X)
    assert [w.filename for w in told if issubclass(w.category, FellBack)] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FellBack)
        again = fast.forward_features(X)
    assert torch.equal(features, alone.forward_features(X)) and torch.equal(again, features)
    with pytest.warns(FellBack, match="forward_head"):
        assert torch.equal(fast.forward_head(features, pre_logits=True), alone.forward_head(features, True))
    assert "forward_features runs" in "\n".join(fast.report.notes)
    assert torch.allclose(fast(X), alone(X), atol=1e-5) and fast.report.calls.fast == 1


def test_features_are_fast_where_they_are_what_is_optimized() -> None:
    class Features(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model.forward_features(x)

    _, alone = made()
    fast: Any = refold.optimize(Features(alone).eval(), X, **QUICK)
    with torch.no_grad():
        assert torch.allclose(fast(X), alone.forward_features(X), atol=1e-6)
    assert fast.report.calls.fast == 1
    assert any(step.name == "MergeLinears" and step.status == "kept" for step in fast.report.steps)


def test_a_method_that_sets_an_attribute_does_not_give_the_fast_way_up() -> None:
    fast, alone = made()
    for name in ("remember", "again"):
        with pytest.warns(FellBack, match=f"{name} runs at the speed of the original: it sets last"):
            assert torch.equal(getattr(fast, name)(X), getattr(alone, name)(X))
    assert torch.equal(fast.last, alone.last) and fast.prepared is not None
    assert torch.allclose(fast(X), alone(X), atol=1e-5) and fast.report.calls.fast == 1


def test_methods_that_compute_nothing_are_those_of_the_original() -> None:
    fast, alone = made()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fast.describe() == alone.describe() and fast.describe == fast.original.describe
        assert fast.get_parameter("head.weight") is fast.original.head.weight


def test_methods_without_a_source_are_those_of_the_original() -> None:
    namespace: dict[str, Any] = {"Backbone": Backbone}
    exec("class Unread(Backbone):\n    def guess(self, x):\n        return self(x)", namespace)
    assert not method_of(namespace["Unread"], "guess").calls_model
    fast, alone = made(namespace["Unread"])
    assert torch.equal(fast.guess(X), alone.guess(X))


def test_generation_is_right_and_says_once_that_it_is_not_faster() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 20}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, eos_token_id=None, bos_token_id=1)).eval()
    ids = torch.randint(0, 20, (2, 4))
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **settings)
    fast: Any = refold.optimize(model, {"input_ids": ids, "use_cache": False}, **QUICK)
    with pytest.warns(FellBack, match="generate runs at the speed of the original"):
        assert torch.equal(fast.generate(ids, **settings), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FellBack)
        assert torch.equal(fast.generate(ids, **settings), expected)
    assert "generate runs at the speed of the original" in "\n".join(fast.report.notes)
