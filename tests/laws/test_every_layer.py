"""No rule raises on a graph that runs; what fires computes the same and is undone exactly, for every kind of layer."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

import refold
from refold.examples import settle
from refold.rewrite.registry import registered
from refold.rewrite.rule import Rewrite
from refold.testing.promises import Breach, check_promises
from refold.testing.random_layers import lazy_models, random_model

RULES = [cls() for cls in registered() if cls.__module__.startswith("refold.")]


def breaches(gm: GraphModule, inputs: tuple[torch.Tensor, ...]) -> list[str]:
    """The promises that rules break on a graph."""
    found = (check_promises(rule, gm, inputs) for rule in RULES)
    return [str(outcome) for outcome in found if isinstance(outcome, Breach)]


@pytest.mark.parametrize("seed", range(0, 40, 8))
def test_traced(seed: int) -> None:
    for each in range(seed, seed + 8):
        model, inputs = random_model(each)
        assert breaches(symbolic_trace(model), inputs) == [], f"seed {each}"


@pytest.mark.parametrize("seed", [54, 100, 101, 103])
def test_captured(seed: int) -> None:
    model, (value,) = random_model(seed)
    gm = refold.trace(model.double(), value.double(), dynamic=False)
    assert breaches(gm, (value.double(),)) == []


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolution_with_fewer_inputs_than_outputs(groups: int) -> None:
    torch.manual_seed(0)
    model = settle(nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=groups), nn.BatchNorm2d(6))).eval()
    gm, inputs = symbolic_trace(model), (torch.randn(2, 4, 5, 5),)
    assert breaches(gm, inputs) == []
    assert refold.history(refold.FoldBatchNorm()(copy.deepcopy(gm)))


@functools.cache
def lazy_models_for(rule: Rewrite) -> list[nn.Module]:
    """Each for one test, which may spoil it: they cannot be copied."""
    return [model for model, _ in lazy_models()]


@pytest.mark.parametrize("place", range(len(list(lazy_models()))))
def test_lazy_layers_are_left_alone(place: int) -> None:
    for rule in RULES:
        gm = symbolic_trace(lazy_models_for(rule)[place])
        code = gm.code
        rule(gm)
        refused = refold.result(gm).refused
        if refold.history(gm):
            refold.undo(gm, None)
        assert gm.code == code
        assert all(reason.reason for reason in refused)


def test_the_refusal_of_a_lazy_layer_says_why() -> None:
    gm = symbolic_trace(nn.Sequential(nn.LazyLinear(3)))
    refold.MergeLinears()(gm)
    assert [refusal.reason for refusal in refold.result(gm).refused] == [
        "it is lazy, and its weights have no shape before it is called for the first time"
    ]


def _registered_otherwise(role: str, how: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Layers that rules merge and fold into, with weights or biases that are no parameters."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(2))
            self.normed = nn.Sequential(nn.ZeroPad2d(1), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.convolutions[0](x) * self.convolutions[1](x)
            return self.normed(self.linears[0](x) + self.linears[1](x))

    model = settle(Model()).eval()
    for layer in [*model.linears, *model.convolutions, model.normed[1]]:
        value = getattr(layer, role).detach().clone()
        delattr(layer, role)
        if how == "attribute":
            setattr(layer, role, value)
        else:
            layer.register_buffer(role, None if how == "nothing" else value, persistent=how == "buffer")
    return model, (torch.randn(2, 4, 4, 4),)


@pytest.mark.parametrize(
    ("role", "how"),
    [("weight", "buffer"), ("bias", "buffer"), ("bias", "buffer that is not saved"), ("bias", "nothing")],
)
def test_weights_that_are_buffers(role: str, how: str) -> None:
    model, inputs = _registered_otherwise(role, how)
    gm = symbolic_trace(model)
    assert breaches(gm, inputs) == []
    for rule in (refold.MergeLinears(), refold.MergeConvolutions()):
        merged = rule(copy.deepcopy(gm))
        names = [name for name, _ in [*merged.named_parameters(), *merged.named_buffers()]]
        assert refold.history(merged) and len(set(names)) == len(names), rule


@pytest.mark.parametrize("role", ["weight", "bias"])
def test_the_refusal_of_a_weight_that_is_a_plain_attribute_says_so(role: str) -> None:
    model, inputs = _registered_otherwise(role, "attribute")
    gm = symbolic_trace(model)
    for rule in RULES:
        before = gm.code
        rule(gm)
        reasons = [refusal.reason for refusal in refold.result(gm).refused]
        if isinstance(rule, refold.MergeLinears | refold.MergeConvolutions):
            assert f"its {role} is neither a parameter nor a buffer" in reasons
        if refold.history(gm):
            refold.undo(gm, None)
        assert gm.code == before
    gm(*inputs)
