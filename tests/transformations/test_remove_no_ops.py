"""RemoveNoOps takes out what gives back its input, to the bit, and leaves everything else."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import symbolic_trace
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import refold
from refold.capture.tracing import trace
from refold.graph.targets import name_of
from refold.transformations.remove_no_ops import RemoveNoOps


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


X = torch.randn(2, 3, 4)
X[0, 0, 0] = -0.0
N = torch.arange(6).reshape(2, 3)

GONE = {
    "cast": (lambda x: x.sin().to(torch.float32).cos(), X, "to"),
    "float()": (lambda x: x.sin().float().cos(), X, "to"),
    "view": (lambda x: x.sin().view(x.shape).cos(), X, "view"),
    "reshape": (lambda x: x.sin().reshape(-1, 3, 4).cos(), X, "reshape"),
    "expand": (lambda x: x.sin().expand(-1, 3, 4).cos(), X, "expand"),
    "there and back": (lambda x: x.sin().flatten(1).reshape(-1, 3, 4).cos(), X, "reshape"),
    "transposes": (lambda x: x.sin().transpose(1, 2).transpose(-1, -2).cos(), X, "transpose"),
    "permutes": (lambda x: x.sin().permute(2, 0, 1).permute(1, 2, 0).cos(), X, "permute"),
    "transpose and permute": (lambda x: x.sin().transpose(0, 2).permute(2, 1, 0).cos(), X, "permute"),
    "times one": (lambda x: (x.sin() * 1.0).cos(), X, "mul"),
    "over one": (lambda x: (x.sin() / 1).cos(), X, "div"),
    "minus zero": (lambda x: (x.sin() - 0).cos(), X, "sub"),
    "plus minus zero": (lambda x: (x.sin() + -0.0).cos(), X, "add"),
    "integers plus zero": (lambda n: (n.abs() + 0).abs(), N, "add"),
    "two minus signs": (lambda x: x.sin().neg().neg().cos(), X, "neg"),
    "a pad of nothing": (lambda x: F.pad(x.sin(), (0, 0, 0, 0)).cos(), X, "pad"),
    "clone": (lambda x: x.sin().clone().cos(), X, "clone"),
    "a copy of a part": (lambda x: F.linear(x[..., :2].clone().cos(), torch.ones(3, 2)).view(-1).cos(), X, "clone"),
    "dropout": (lambda x: F.dropout(x.sin(), 0.5, training=False).cos(), X, "dropout"),
    "dropout of nothing": (lambda x: F.dropout(x.sin(), 0.0, training=True).cos(), X, "dropout"),
}

ANY_SIZE = {"cast", "view", "expand", "transposes", "times one"}

KEPT = {
    "another dtype": (lambda x: x.to(torch.float64).cos(), X, "to"),
    "zero added": (lambda x: (x.sin() + 0).cos(), X, "add"),
    "a cast by arithmetic": (lambda n: (n * 1.0).cos(), N, "mul"),
    "a cast by division": (lambda n: (n / 1).cos(), N, "div"),
    "other transposes": (lambda x: x.transpose(0, 1).transpose(1, 2).cos(), X, "transpose"),
    "permutes that add up": (lambda x: x.permute(2, 0, 1).permute(2, 0, 1).cos(), X, "permute"),
    "a real expand": (lambda x: x[:1].expand(2, 3, 4).cos(), X, "expand"),
    "a real reshape": (lambda x: x.reshape(-1, 4).cos(), X, "reshape"),
    "contiguous of a transpose": (lambda x: x.transpose(0, 1).contiguous().cos(), X, "contiguous"),
    "contiguous before a view": (lambda x: _view_far_behind(x.transpose(1, 2).contiguous()), X, "contiguous"),
    "a copy of a part before a view": (lambda x: x[..., :2].clone().view(2, -1).cos(), X, "clone"),
    "a copy of a part that leaves": (lambda x: x[..., :2] * 1.0, X, "mul"),
    "there and back before a view": (lambda x: _view_far_behind(x.mT.flatten(1).reshape(2, 4, 3)), X, "reshape"),
    "a part": (lambda x: x[1:].cos(), X, "slice"),
    "detach": (lambda x: x.sin().detach().cos(), X, "detach"),
    "a pad": (lambda x: F.pad(x.sin(), (0, 1)).cos(), X, "pad"),
    "a pad of nothing that is written into": (lambda x: F.pad(x.sin(), (0, 0)).add_(1), X, "pad"),
    "a clone that is written into": (lambda x: x.sin().clone().add_(1), X, "clone"),
    "a copy of what is written into": (lambda x: _write_source(x), X, "clone"),
    "a clone that leaves": (lambda x: x.clone(), X, "clone"),
}


def _write_source(x):
    y = x.sin()
    kept = y.clone()
    y.add_(1)
    return kept * y


def _view_far_behind(x):
    return (x.reshape(2, 2, 2, 3).sin() + 1).view(2, -1)


def names(gm):
    return [name_of(n) for n in gm.graph.nodes if n.op.startswith("call")]


@pytest.mark.parametrize("name", GONE)
def test_gone(name):
    function, x, op = GONE[name]
    gm = trace(Of(function), x, dynamic=name in ANY_SIZE and "auto")
    original = copy.deepcopy(gm)
    assert op in names(gm)
    RemoveNoOps()(gm)
    assert op not in names(gm)
    expected, found = original(x), gm(x)
    assert torch.equal(expected, found) and torch.equal(torch.signbit(expected), torch.signbit(found))
    RemoveNoOps()(gm, reverse=True)
    assert gm.code == original.code


@pytest.mark.parametrize("name", KEPT)
def test_kept(name):
    function, x, op = KEPT[name]
    gm = trace(Of(function), x)
    before = names(gm).count(op)
    RemoveNoOps()(gm)
    assert before and names(gm).count(op) == before
    assert torch.equal(gm(x.clone()), function(x.clone()))


ALIASES = {
    "two copies": (lambda x: x.clone().clone(), 1),
    "two products": (lambda x: (x * 1) * 1, 1),
    "a copy and what it was made from": (lambda x: (y := x.sin(), y.clone().clone())[:2], 1),
    "a copy of a view of an output": (lambda x: (y := x.sin(), y.view(-1).clone())[:2], 0),
    "two copies of one value": (lambda x: (y := x.sin(), y.clone(), y.clone())[1:], 1),
}


@pytest.mark.parametrize("name", ALIASES)
def test_results_do_not_share_memory_more_than_before(name):
    function, removed = ALIASES[name]
    gm = trace(Of(function), X, dynamic=False)
    RemoveNoOps()(gm)
    assert len(refold.result(gm).rewritten if refold.history(gm) else ()) == removed
    x = X.clone()
    results = gm(x)
    values = [*results, x] if isinstance(results, tuple) else [results, x]
    assert len({v.data_ptr() for v in values}) == len(values)


def recorded(function, x):
    gm = symbolic_trace(Of(function))
    FakeTensorProp(gm).propagate(x)
    return gm


def test_out_is_written():
    def negated(x):
        buffer = torch.zeros_like(x)
        torch.neg(torch.neg(x), out=buffer)
        return buffer

    gm = RemoveNoOps()(symbolic_trace(Of(negated)))
    assert torch.equal(gm(X), X)


SHAPES = {
    "the view": lambda a: (b := a.transpose(0, 1).transpose(0, 1), b.t_(), a + 0.5)[2],
    "its source": lambda a: (b := a.transpose(0, 1).transpose(0, 1), a.t_(), b + 0.5)[2],
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_view_of_which_the_shape_is_changed_in_place(name):
    x = torch.randn(2, 3)
    gm = recorded(lambda x: SHAPES[name](x.relu()), x)
    RemoveNoOps()(gm)
    assert not refold.history(gm)
    assert torch.equal(gm(x), SHAPES[name](x.relu()))


def test_gradients_that_a_copy_stops():
    graph = torch.fx.Graph()
    h = graph.call_function(torch.sin, (graph.placeholder("x"),))
    graph.call_function(torch._C._set_grad_enabled, (False,))
    copied = graph.call_method("clone", (h,))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    graph.output(graph.call_function(torch.mul, (h, copied)))
    gm = torch.fx.GraphModule(nn.Module(), graph)
    FakeTensorProp(gm).propagate(X)
    original = copy.deepcopy(gm)
    RemoveNoOps()(gm)
    assert "gradients are switched" in refold.result(gm).refused[0].reason
    grads = []
    for module in (gm, original):
        x = X.clone().requires_grad_()
        module(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_why_zero_is_not_neutral():
    gm = RemoveNoOps()(trace(Of(KEPT["zero added"][0]), X))
    assert "-0.0 + 0 is 0.0" in refold.result(gm).refused[0].reason


def test_modules_in_eval_only():
    model = nn.Sequential(nn.Identity(), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.0), nn.AlphaDropout(0.3))
    gm = RemoveNoOps()(symbolic_trace(model))
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == ["1", "2", "4"]
    assert all("in training mode" in r.reason for r in refold.result(gm).refused)
    gm = RemoveNoOps()(symbolic_trace(model.eval()))
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == ["2"]


def test_a_subclass_or_a_hook_is_left_alone():
    class Loud(nn.Identity):
        def forward(self, x):
            return x + 1

    hooked = nn.Identity()
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    gm = symbolic_trace(nn.Sequential(Loud(), hooked), {})
    RemoveNoOps()(gm)
    assert torch.equal(gm(torch.ones(2)), torch.full((2,), 4.0))


def test_recorded_dtypes_that_no_longer_hold():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x).to(torch.float32) * 2

    gm = trace(Cast(), torch.randn(2, 4))
    for parameter in gm.parameters():
        parameter.data = parameter.data.double()
    RemoveNoOps()(gm)
    assert "to" in names(gm)
    assert "was cast since" in refold.result(gm).refused[0].reason


def test_contiguous_of_what_is_contiguous():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.conv = nn.Linear(4, 4), nn.Conv1d(3, 3, 1)

        def forward(self, x):
            fed = F.linear(self.layer(x).unsqueeze(0).contiguous(), self.layer.weight).contiguous()
            return fed + self.conv(x).contiguous()

    x = torch.randn(2, 3, 4)
    gm = symbolic_trace(Layers())
    original = copy.deepcopy(gm)
    RemoveNoOps()(gm)
    assert names(original).count("contiguous") == 3 and names(gm).count("contiguous") == 1
    assert torch.equal(gm(x), original(x))


def test_a_shape_of_an_example_is_no_proof():
    gm = symbolic_trace(Of(lambda x: x.reshape(2, -1, 4).cos()))
    FakeTensorProp(gm).propagate(X)
    RemoveNoOps()(gm)
    assert gm(torch.randn(4, 3, 4)).shape == (2, 6, 4)


def test_long_chains_take_linear_time():
    gm = symbolic_trace(nn.Sequential(*[nn.Dropout(0.1) for _ in range(300)], nn.ReLU()).eval())
    RemoveNoOps()(gm)
    assert len([n for n in gm.graph.nodes if n.op == "call_module"]) == 1
    assert len(refold.result(gm).rewritten) == 300
