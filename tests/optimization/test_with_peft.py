"""Models with adapters of PEFT: merged while they are optimized, switched, disabled and unloaded as before."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import refold
from refold.errors import FellBack

peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")

X = torch.randn(3, 16)
QUICK = {"backend": "plain", "effort": "quick", "progress": False}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.sigmoid(self.query(x)) * self.key(x))


def adapted() -> Any:
    """A model with two adapters, the first of which is active."""
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=2, target_modules=["query", "key"], init_lora_weights=False)
    model = peft.get_peft_model(Net(), settings)
    model.add_adapter("other", settings)
    return model.eval()


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, atol=1e-5)


@pytest.fixture(scope="module")
def made() -> tuple[Any, Any]:
    model = adapted()
    return refold.optimize(model, X, **QUICK), copy.deepcopy(model)


def test_adapters_are_merged_without_being_asked_for(made: tuple[Any, Any]) -> None:
    fast, alone = made
    kept = [step.name for step in fast.report.steps if step.status == "kept"]
    assert "MergeLora" in kept and "MergeLinears" in kept, "and what they were merged into is merged too"
    before = fast.report.calls.fast
    with torch.no_grad():
        assert close(fast(X), alone(X))
    assert fast.report.calls.fast == before + 1


def test_the_model_of_the_user_is_untouched(made: tuple[Any, Any]) -> None:
    fast, alone = made
    own = fast.original.state_dict()
    assert all(torch.equal(own[name], value) for name, value in alone.state_dict().items())
    assert not any(getattr(module, "merged_adapters", []) for module in fast.original.modules())


def test_switched_and_disabled_adapters_run_the_original_and_are_right(made: tuple[Any, Any]) -> None:
    fast, alone = made
    before = fast.report.calls
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FellBack)
        expected = alone(X)
        with fast.disable_adapter(), alone.disable_adapter():
            assert close(fast(X), alone(X)) and not close(fast(X), expected)
        for model in (fast, alone):
            model.set_adapter("other")
        assert close(fast(X), alone(X)) and not close(fast(X), expected)
        for model in (fast, alone):
            model.set_adapter("default")
        assert close(fast(X), expected)
    after = fast.report.calls
    assert (after.fast - before.fast, after.original - before.original) == (1, 4)


def test_each_choice_of_adapters_can_be_prepared() -> None:
    model = adapted()
    alone = copy.deepcopy(model)
    fast = refold.optimize(model, X, **QUICK)
    fast.set_adapter("other")
    fast.prepare(X)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", FellBack)
        for name in ("default", "other", "default"):
            fast.set_adapter(name)
            alone.set_adapter(name)
            assert close(fast(X), alone(X))
            assert fast.refresh() == [], "each choice has been prepared"
    assert fast.report.calls.fast == 3
    assert "Calls with these adapters active: run by plain." in fast.report.notes
    assert fast.restore() is model
    alone.set_adapter("default")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in alone.state_dict().items())


def test_an_unloaded_model_is_exact() -> None:
    model = adapted()
    alone = copy.deepcopy(model)
    fast: Any = refold.optimize(model, X, **QUICK)
    base = fast.unload()
    with torch.no_grad():
        assert torch.equal(base(X), alone.unload()(X))


def test_restored_bit_for_bit_and_trained_further() -> None:
    model = adapted()
    alone = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    fast = refold.optimize(model, X, **QUICK)
    assert fast.restore() is model
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in alone.state_dict().items())
    model(X).sum().backward()
    alone(X).sum().backward()
    grads = {name: parameter.grad for name, parameter in alone.named_parameters() if parameter.grad is not None}
    assert grads and all(torch.equal(parameters[name].grad, grad) for name, grad in grads.items())


def test_a_trained_adapter_is_merged_anew_by_refresh() -> None:
    model = adapted()
    fast = refold.optimize(model, X, **QUICK)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B.default" in name:
                parameter.mul_(2)
        assert fast.refresh()
        assert close(fast(X), copy.deepcopy(model)(X))
    assert fast.report.calls.fast == 1
