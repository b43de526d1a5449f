"""EliminateCommonSubexpressions joins what is surely the same, and nothing that only looks the same."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import symbolic_trace

import refold
from refold.purity import name_of
from refold.transformations.eliminate_common_subexpressions import EliminateCommonSubexpressions


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.layer, self.drop, self.norm = nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x):
        return self.function(self, x)


X = torch.randn(3, 4)


def rewritten(function, train=False):
    gm = symbolic_trace(Of(function).train(train))
    original = copy.deepcopy(gm)
    EliminateCommonSubexpressions()(gm)
    torch.manual_seed(0)
    expected = original(X.clone())
    torch.manual_seed(0)
    found = gm(X.clone())
    for a, b in zip(torch.utils._pytree.tree_leaves(expected), torch.utils._pytree.tree_leaves(found), strict=True):
        assert torch.equal(a, b)
    return gm, original


def names(gm):
    return [n.name if n.op == "call_module" else name_of(n) for n in gm.graph.nodes if n.op.startswith("call")]


def test_whole_chains_are_joined_in_one_round():
    gm, _ = rewritten(lambda m, x: (x.sin() * 2).cos() - (x.sin() * 2).cos().relu())
    assert names(gm) == ["sin", "mul", "cos", "relu", "sub"]


def test_modules_and_fetched_weights():
    gm, _ = rewritten(lambda m, x: m.layer(x).relu() + m.layer(x) + F.linear(x, m.layer.weight) * m.drop(x) - m.drop(x))
    assert names(gm).count("layer") == 1 and names(gm).count("drop") == 1
    gm, original = rewritten(lambda m, x: x * m.weight.exp() + m.weight.exp())
    assert names(gm).count("exp") == 1
    assert len([n for n in gm.graph.nodes if n.op == "get_attr"]) == 1
    EliminateCommonSubexpressions()(gm, reverse=True)
    assert gm.code == original.code


KEPT = {
    "1 is not 1.0": lambda m, x: x.add(1) + x.add(1.0),
    "0.0 is not -0.0": lambda m, x: torch.atan2(x * 0.0, x) + torch.atan2(x * -0.0, x),
    "random numbers": lambda m, x: x + torch.rand_like(x) - torch.rand_like(x),
    "dropout": lambda m, x: F.dropout(x, 0.5, training=True) - F.dropout(x, 0.5, training=True),
    "other settings": lambda m, x: x.sum(0, keepdim=True) + x.sum(0),
    "a list is not a tuple": lambda m, x: torch.movedim(x, (0, 1), (1, 0)).sum() + torch.movedim(x, [0, 1], [1, 0]),
    "one is written into": lambda m, x: x.sin().add_(1) + x.sin(),
    "the input is written into": lambda m, x: [x.sin(), x.add_(1), x.sin()],
    "a view of the input is written into": lambda m, x: [x.sin(), x[0].add_(1), x.sin()],
    "both leave": lambda m, x: [x.sin(), x.sin()],
    "both leave as views": lambda m, x: [x.sin().t(), x.sin()[0]],
}


@pytest.mark.parametrize("name", KEPT)
def test_kept(name):
    gm, original = rewritten(KEPT[name])
    assert gm.code == original.code
    assert not refold.history(gm)


def test_training_mode_matters():
    gm, _ = rewritten(lambda m, x: m.drop(x) - m.drop(x) * m.norm(x) / m.norm(x), train=True)
    assert names(gm).count("drop") + names(gm).count("drop_1") == 2
    assert names(gm).count("norm") + names(gm).count("norm_1") == 2


def test_gradients_are_the_same():
    gm, original = rewritten(lambda m, x: m.layer(x).relu() * m.layer(x))
    for module in (gm, original):
        module(X).sum().backward()
    assert torch.allclose(gm.layer.weight.grad, original.layer.weight.grad)


def test_modes_are_kept_apart():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.sin, (x,))
    graph.call_function(torch._C._set_grad_enabled, (False,))
    second = graph.call_function(torch.sin, (x,))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    graph.output(graph.call_function(torch.add, (first, second)))
    gm = torch.fx.GraphModule(nn.Module(), graph)
    EliminateCommonSubexpressions()(gm)
    assert names(gm).count("sin") == 2


def test_foreign_modules_are_left_alone():
    class Counter(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.counter = Counter()

        def forward(self, x):
            return self.counter(x) + self.counter(x)

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, path):
            return True

    model = Two()
    gm = torch.fx.GraphModule(model, Tracer().trace(model))
    EliminateCommonSubexpressions()(gm)
    assert len([n for n in gm.graph.nodes if n.op == "call_module"]) == 2
