"""FuseActivations finds an activation however it is written, and takes nothing else for one."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import symbolic_trace

from refold import explain, trace, undo, verify
from refold.graph.targets import name_of
from refold.transformations.fuse_activations import FuseActivations

X = torch.randn(5, 4)
C = math.sqrt(2 / math.pi)


class Then(nn.Module):
    """A layer, and a function of what it gives."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x):
        return self.function(self.layer(x))


WRITTEN = {
    "gelu as in GPT-2": ("gelu", lambda x: 0.5 * x * (1.0 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3.0))))),
    "gelu, halved last": ("gelu", lambda x: (x * (x.pow(3).mul(0.044715).add(x).mul(C).tanh() + 1)).div(2)),
    "gelu, factored": ("gelu", lambda x: 0.5 * x * (1.0 + torch.tanh(x * C * (1.0 + 0.044715 * x * x)))),
    "gelu, exact": ("gelu", lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
    "gelu, exact, turned": ("gelu", lambda x: (torch.erf(x * math.sqrt(0.5)) + 1) * (x / 2)),
    "silu": ("silu", lambda x: x * torch.sigmoid(x)),
    "silu, a method": ("silu", lambda x: x.sigmoid().mul(x)),
    "silu by exp": ("silu", lambda x: x / (1 + torch.exp(-x))),
    "mish": ("mish", lambda x: x * torch.tanh(F.softplus(x))),
    "hardswish": ("hardswish", lambda x: x * F.relu6(x + 3) / 6),
    "hardswish by clamp": ("hardswish", lambda x: x * torch.clamp(x + 3, 0, 6) * (1 / 6)),
    "hardswish by hardsigmoid": ("hardswish", lambda x: F.hardsigmoid(x) * x),
}

OTHERS = {
    "a constant of ten digits": lambda x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))),
    "gelu by sigmoid, which is nearer to zero": lambda x: x * torch.sigmoid(2 * C * (x + 0.044715 * x**3)),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "another constant": lambda x: 0.5 * x * (1.0 + torch.tanh(C * (x + 0.0447 * torch.pow(x, 3.0)))),
    "a gate": lambda x: x * torch.sigmoid(x + 1),
    "only tanh": lambda x: torch.tanh(x) * 2,
    "two values": lambda x: x * torch.sigmoid(x.flip(0)),
    "shifted": lambda x: x * torch.sigmoid(x) + 1,
}


def names(gm):
    return [name_of(node) for node in gm.graph.nodes if node.op in ("call_function", "call_method")]


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "symbolic"])
@pytest.mark.parametrize("name", WRITTEN)
def test_however_it_is_written(name, captured):
    kind, function = WRITTEN[name]
    model = Then(function).eval()
    expected = copy.deepcopy(model).double()(X.double())
    gm = trace(model, X) if captured else symbolic_trace(model)
    before = gm.code
    assert kind not in names(gm)
    FuseActivations()(gm)
    assert [n for n in names(gm) if n != "linear"] == [kind]
    assert verify(gm, X).right
    torch.testing.assert_close(gm(X).double(), expected, atol=1e-5, rtol=1e-5)
    undo(gm)
    assert gm.code == before


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_something_else_is_left_alone(name):
    gm = trace(Then(OTHERS[name]), X)
    said = explain(gm, FuseActivations())
    assert name == "shifted" or not said.rewritten
    FuseActivations()(gm)
    assert verify(gm, X).right


def test_what_comes_after_an_activation_stays():
    gm = trace(Then(OTHERS["shifted"]), X)
    FuseActivations()(gm)
    assert [n for n in names(gm) if n != "linear"] == ["silu", "add"]


def test_the_gate_of_a_gated_layer_is_an_activation():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up = nn.Linear(4, 6), nn.Linear(4, 6)

        def forward(self, x):
            gate = self.gate(x)
            return gate * torch.sigmoid(gate) * self.up(x)

    gm = trace(Gated(), X)
    FuseActivations()(gm)
    assert [n for n in names(gm) if n != "linear"] == ["silu", "mul"] and verify(gm, X).right


def test_one_behind_the_other():
    gm = trace(Then(lambda x: (y := x * torch.sigmoid(x)) * torch.sigmoid(y)), X)
    FuseActivations()(gm)
    assert [n for n in names(gm) if n != "linear"] == ["silu", "silu"] and verify(gm, X).right


def reads_a_part(x):
    inner = C * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + torch.tanh(inner)) - inner.sum()


def writes_in_between(x):
    gate = torch.sigmoid(x)
    x.add_(1)
    return x * gate


REFUSED = {
    "reads a part of it": reads_a_part,
    "add_ writes into layer before mul": writes_in_between,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals_say_why(reason):
    gm = symbolic_trace(Then(REFUSED[reason]))
    said = explain(gm, FuseActivations())
    assert not said.rewritten and reason in said.refused[0].reason


def test_integers_have_no_activation():
    """`x * sigmoid(x)` of whole numbers is a fraction; silu refuses them."""

    class Whole(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(x)

    for gm in (symbolic_trace(Whole()), trace(Whole(), torch.arange(4))):
        said = explain(gm, FuseActivations())
        assert not said.rewritten and "floating-point" in said.refused[0].reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fewer_roundings_are_no_worse(dtype):
    torch.manual_seed(0)
    x = (3 * torch.randn(4000)).to(dtype)
    written = WRITTEN["gelu as in GPT-2"][1]
    exact = written(x.double())
    gm = trace(_Only(written), x)
    before = (gm(x).double() - exact).abs().mean()
    FuseActivations()(gm)
    assert "gelu" in names(gm)
    assert (gm(x).double() - exact).abs().mean() < before


class _Only(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_gradients_are_those_of_the_written_form():
    model = Then(WRITTEN["gelu as in GPT-2"][1]).double()
    gm = trace(copy.deepcopy(model), X.double())
    FuseActivations()(gm)
    model(X.double()).sum().backward()
    gm(X.double()).sum().backward()
    torch.testing.assert_close(gm.get_parameter("layer.weight").grad, model.layer.weight.grad)
