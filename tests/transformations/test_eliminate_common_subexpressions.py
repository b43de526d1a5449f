"""EliminateCommonSubexpressions joins what is surely the same, and nothing that only looks the same."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import symbolic_trace

import refold
from refold.graph.targets import name_of
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
    "gamma": lambda m, x: [a := m.weight.exp(), torch._standard_gamma(a) - torch._standard_gamma(a)],
    "both leave": lambda m, x: [x.sin(), x.sin()],
    "both leave as views": lambda m, x: [x.sin().t(), x.sin()[0]],
}


@pytest.mark.parametrize("name", KEPT)
def test_kept(name):
    gm, original = rewritten(KEPT[name])
    assert gm.code == original.code
    assert not refold.history(gm)


def test_at_most_one_of_many_leaves():
    gm, _ = rewritten(lambda m, x: [x.sin().sum(), x.sin(), x.sin()])
    _, first, second = gm(X.clone())
    assert first.data_ptr() != second.data_ptr() and names(gm).count("sin") == 2


class Norms(nn.Module):
    """A norm called twice in training, in every way in which its statistics move."""

    def __init__(self, call):
        super().__init__()
        self.call = call
        self.batch = nn.BatchNorm1d(4).double()
        self.instance = nn.InstanceNorm1d(4, track_running_stats=True).double()
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)).double()

    def forward(self, x):
        return self.call(self, x) + self.call(self, x)


def positional(norm):
    return norm.running_mean, norm.running_var


NORMS = {
    "batch norm": lambda m, x: m.batch(x),
    "instance norm": lambda m, x: m.instance(x),
    "spectral norm": lambda m, x: m.spectral(x),
    "F.batch_norm": lambda m, x: F.batch_norm(x, *positional(m.batch), None, None, True),
    "F.instance_norm": lambda m, x: F.instance_norm(x, *positional(m.batch)),
    "torch.batch_norm": lambda m, x: torch.batch_norm(x, None, None, *positional(m.batch), True, 0.1, 1e-5, False),
    "aten": lambda m, x: torch.ops.aten.batch_norm.default(x, None, None, *positional(m.batch), True, 0.1, 1e-5, False),
}


class Leaves(torch.fx.Tracer):
    def is_leaf_module(self, module, path):
        return True


@pytest.mark.parametrize("name", NORMS)
def test_statistics_move_twice(name):
    model = Norms(NORMS[name]).train()
    gm = torch.fx.GraphModule(model, Leaves().trace(model))
    original = copy.deepcopy(gm)
    EliminateCommonSubexpressions()(gm)
    assert not refold.history(gm)
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    assert torch.equal(gm(x), original(x))
    state = original.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in gm.state_dict().items())


@pytest.mark.parametrize("call", [lambda m, x: m.batch(x), lambda m, x: F.batch_norm(x, *positional(m.batch))])
def test_statistics_that_only_are_read_do_not_matter(call):
    model = Norms(call).eval()
    gm = torch.fx.GraphModule(model, Leaves().trace(model))
    EliminateCommonSubexpressions()(gm)
    assert refold.history(gm)


def written_between(write, read):
    """x·read, a write, and x·read again, on a module of a layer and a buffer of three names."""
    root = nn.Module()
    root.layer = nn.Linear(4, 4).double().requires_grad_(False)
    root.register_buffer("one", torch.ones(4, dtype=torch.float64))
    root.register_buffer("two", root.one)
    root.register_buffer("part", root.one[1:2])
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    first = read(graph, x)
    graph.call_method("mul_", (graph.get_attr(write), 2.0))
    graph.output(graph.call_function(torch.sub, (first, read(graph, x))))
    gm = torch.fx.GraphModule(root, graph)
    original = copy.deepcopy(gm)
    EliminateCommonSubexpressions()(gm)
    x = X.double()
    assert torch.equal(gm(x), original(x))
    return bool(refold.history(gm))


def test_a_tensor_is_known_by_its_memory():
    def layer(graph, x):
        return graph.call_module("layer", (x,))

    def two(graph, x):
        return graph.call_function(torch.mul, (x, graph.call_function(torch.sin, (graph.get_attr("two"),))))

    assert not written_between("layer.weight", layer) and written_between("one", layer)
    assert not written_between("one", two) and not written_between("part", two) and written_between("layer.bias", two)


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


def test_modules_of_unknown_code_are_left_alone():
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
