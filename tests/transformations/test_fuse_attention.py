"""FuseAttention computes the same in float64, and refuses where it would not."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import refold
from refold.capture.tracing import trace
from refold.graph.targets import name_of
from refold.transformations.fuse_attention import FuseAttention


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.bias = nn.Parameter(torch.randn(1, 2, 5, 5))

    def forward(self, q, k, v):
        return self.function(self, q, k, v)


def tensors(rank=4):
    shape = (3, 2, 5, 4) if rank == 4 else (6, 5, 4)
    return tuple(torch.randn(shape, dtype=torch.float64) for _ in range(3))


def causal():
    return torch.zeros(5, 5, dtype=torch.float64).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)


def in_place(m, q, k, v):
    scores = q @ k.transpose(-1, -2)
    scores += m.bias
    return scores.softmax(-1) @ v


FUSED = {
    "plain": (lambda m, q, k, v: (q @ k.transpose(-1, -2)).softmax(-1) @ v, 4),
    "divided": (lambda m, q, k, v: F.softmax(q @ k.transpose(-2, -1) / 3, -1) @ v, 4),
    "multiplied": (lambda m, q, k, v: torch.matmul(F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.3, dim=-1), v), 4),
    "biased": (lambda m, q, k, v: (q @ k.transpose(-1, -2) * 0.5 + m.bias).softmax(-1) @ v, 4),
    "two biases": (lambda m, q, k, v: (m.bias + q @ k.transpose(-1, -2) + m.bias[:, :1]).softmax(-1) @ v, 4),
    "biased in place": (in_place, 4),
    "causal": (lambda m, q, k, v: (q @ k.transpose(-1, -2) + causal()).softmax(-1) @ v, 4),
    "keys not transposed": (lambda m, q, k, v: (q @ k.flip(0).permute(0, 1, 3, 2)).softmax(-1) @ v, 4),
    "dropout": (lambda m, q, k, v: F.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.1, False) @ v, 4),
    "three dimensions": (lambda m, q, k, v: torch.bmm((torch.bmm(q, k.transpose(1, 2)) / 2).softmax(2), v), 3),
    "written once it is over": (lambda m, q, k, v: _written(m, q, k, v, "after"), 4),
    "on attention": (lambda m, q, k, v: _attention(_attention(q, k, v), _attention(k, q, v), q), 4),
    "interleaved, with two masks": (lambda m, q, k, v: _interleaved(m, q, k, v), 4),
    "viewed": (lambda m, q, k, v: ((q @ k.transpose(-1, -2)).softmax(-1) @ v).view(6, 5, 4), 4),
}


def classic(model, *inputs):
    """A graph as torch.fx traces it: modules stay, and what is written in place keeps its name."""
    gm = torch.fx.symbolic_trace(model.eval())
    FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*inputs)
    return gm


def names(gm):
    return [name_of(n) for n in gm.graph.nodes if n.op.startswith("call")]


@pytest.mark.parametrize("name", FUSED)
def test_fused(name):
    function, rank = FUSED[name]
    inputs = tensors(rank)
    gm = trace(Of(function).double(), *inputs, dynamic=False)
    original = copy.deepcopy(gm)
    FuseAttention()(gm)
    assert "softmax" not in names(gm) and "scaled_dot_product_attention" in names(gm)
    assert torch.allclose(gm(*inputs), original(*inputs), rtol=1e-12, atol=1e-12)
    FuseAttention()(gm, reverse=True)
    assert gm.code == original.code


def _attention(q, k, v):
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def _interleaved(m, q, k, v):
    masks = m.bias * 2, m.bias[:, :1]
    first, second = ((q * n @ k.transpose(-1, -2) + masks[0] + masks[1]).softmax(-1) for n in (1, 2))
    return second @ v + 3 * (first @ v)


def _written(m, q, k, v, which):
    copies = {"query": q * 1.5, "keys": k * 1.5, "mask": m.bias * 1.5}
    scores = copies["query"] @ copies["keys"].transpose(-1, -2) + copies["mask"]
    if which in copies:
        copies[which].add_(torch.arange(float(copies[which].shape[-1])))
    result = scores.softmax(-1) @ v
    copies["query"].add_(1.0)
    return result + sum(value.sum() for value in copies.values())


def _masked_in_place(q, k, v):
    mask = torch.zeros(5, 5, dtype=torch.float64)
    mask[1] = -torch.inf
    return (q @ k.transpose(-1, -2) + mask).softmax(-1) @ v


REFUSED = {
    "query written": (lambda m, q, k, v: _written(m, q, k, v, "query"), "writes into"),
    "keys written": (lambda m, q, k, v: _written(m, q, k, v, "keys"), "writes into"),
    "mask written": (lambda m, q, k, v: _written(m, q, k, v, "mask"), "writes into"),
    "mask made in place": (lambda m, q, k, v: _masked_in_place(q, k, v), "may put −∞ into its mask"),
    "weights are values": (lambda m, q, k, v: (w := (q @ k.transpose(-1, -2)).softmax(-1)) @ w, "also operands"),
    "scores are a mask": (lambda m, q, k, v: ((s := q @ k.transpose(-1, -2)) + s).softmax(-1) @ v, "also operands"),
    "floored": (
        lambda m, q, k, v: torch.div(q @ k.transpose(-1, -2), 2.0, rounding_mode="floor").softmax(-1) @ v,
        "div changes its scores",
    ),
    "cast to integers": (
        lambda m, q, k, v: (q @ k.transpose(-1, -2)).to(torch.int32).to(q.dtype).softmax(-1) @ v,
        "rounded to torch.int32",
    ),
    "cast to a coarser dtype": (
        lambda m, q, k, v: (q @ k.transpose(-1, -2)).float().softmax(-1).double() @ v,
        "rounded to torch.float32",
    ),
    "bits are viewed": (lambda m, q, k, v: (_attention(q, k, v) * 2).view(torch.int64), "depends on the memory layout"),
    "weights are read": (lambda m, q, k, v: _with_weights(q, k, v), "also read by"),
    "a computed scale": (lambda m, q, k, v: (q @ k.transpose(-1, -2) * q.sum()).softmax(-1) @ v, "is computed"),
    "a negative scale": (lambda m, q, k, v: (q @ k.transpose(-1, -2) * -2.0).softmax(-1) @ v, "scaled by -2.0"),
    "a scaled mask": (lambda m, q, k, v: ((q @ k.transpose(-1, -2) + m.bias) / 2).softmax(-1) @ v, "mask is scaled"),
    "filled": (lambda m, q, k, v: _filled(q, k, v), "a whole row is masked"),
    "a mask that is an input": (lambda m, q, k, v: ((q @ k.transpose(-1, -2)) + v @ q.mT).softmax(-1) @ v, "input"),
    "a row of −∞": (lambda m, q, k, v: (q @ k.transpose(-1, -2) + _blocked()).softmax(-1) @ v, "−∞ into its mask"),
    "something between": (lambda m, q, k, v: (q @ k.transpose(-1, -2)).tanh().softmax(-1) @ v, "tanh changes"),
    "other heads": (lambda m, q, k, v: (q @ k[:, :1].transpose(-1, -2)).softmax(-1) @ v, "differ in batch or heads"),
}


def _with_weights(q, k, v):
    weights = (q @ k.transpose(-1, -2)).softmax(-1)
    return weights @ v, weights


def _filled(q, k, v):
    return (q @ k.transpose(-1, -2)).masked_fill(q[..., :1] > 0, -torch.inf).softmax(-1) @ v


def _blocked():
    return torch.zeros(5, 5, dtype=torch.float64).masked_fill((torch.arange(5) > 3)[:, None], -torch.inf)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, words = REFUSED[name]
    gm = trace(Of(function).double(), *tensors(), dynamic=False)
    FuseAttention()(gm)
    assert not refold.history(gm)
    assert any(words in r.reason for r in refold.result(gm).refused), refold.result(gm)


@pytest.mark.parametrize("hooked", ["softmax", "dropout", "identity"])
def test_hooks_keep_their_effect(hooked):
    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.softmax, self.dropout, self.identity = nn.Softmax(-1), nn.Dropout(0.1), nn.Identity()

        def forward(self, q, k, v):
            return self.identity(self.dropout(self.softmax(q @ k.transpose(-1, -2)))) @ v

    inputs = tensors()
    gm = classic(Hooked(), *inputs)
    assert refold.result(FuseAttention()(copy.deepcopy(gm))).rewritten
    gm.get_submodule(hooked).register_forward_hook(lambda module, given, result: result * 2)
    FuseAttention()(gm)
    assert not refold.history(gm) and "hooks are registered" in refold.result(gm).refused[0].reason


def test_modules_are_not_taken_for_the_functions_they_are_named_after():
    class Mul(nn.Module):
        def forward(self, x, y):
            return x.tanh() * y

    model = nn.Module()
    model.mul = Mul()
    graph = torch.fx.Graph()
    q = graph.placeholder("q")
    scores = graph.call_function(torch.matmul, (q, graph.call_method("transpose", (q, -1, -2))))
    scaled = graph.call_module("mul", (scores, 0.5))
    graph.output(graph.call_function(torch.matmul, (graph.call_function(F.softmax, (scaled, -1)), q)))
    gm = torch.fx.GraphModule(model, graph)
    FakeTensorProp(gm).propagate(tensors()[0])
    FuseAttention()(gm)
    assert not refold.history(gm) and "mul changes its scores" in refold.result(gm).refused[0].reason


def test_arguments_by_name():
    class Named(nn.Module):
        def forward(self, q, k, v):
            k, v = (x.unsqueeze(dim=2).expand(-1, -1, 2, -1, -1).reshape(3, 4, 5, 4) for x in (k, v))
            scores = torch.mul(torch.matmul(q, k.transpose(dim0=2, dim1=3)), other=0.5)
            return torch.matmul(F.softmax(scores, dim=-1), v)

    q, k, v = torch.randn(3, 4, 5, 4), *tensors()[1:]
    q = q.double()
    gm = torch.fx.symbolic_trace(Named())
    FuseAttention()(gm)
    assert "not recorded" in refold.result(gm).refused[0].reason
    FakeTensorProp(gm).propagate(q, k, v)
    expected = copy.deepcopy(gm)(q, k, v)
    FuseAttention()(gm)
    assert len(refold.result(gm).rewritten) == 2  # also that the heads are repeated
    assert torch.allclose(gm(q, k, v), expected, rtol=1e-12, atol=1e-12)


class Added(nn.Module):
    """Attention with a mask that is made from a row for each example, and a buffer."""

    def __init__(self, mask, buffer=None):
        super().__init__()
        self.mask = mask
        self.register_buffer("buffer", buffer)

    def forward(self, q, keep):
        scores = q @ q.transpose(-1, -2)
        for mask in self.mask(self, keep[:, None, None, :], q.dtype):
            scores = scores + mask
        return scores.softmax(-1) @ q


def _with_row(value):
    buffer = torch.zeros(5, 5)
    buffer[1] = value
    return buffer


def _smallest(m, keep, dtype):
    return ((1 - keep.to(dtype)) * torch.finfo(dtype).min,)


MASKS = {
    "a buffer with a row of −∞": (lambda m, keep, d: (m.buffer.to(d),), _with_row(-torch.inf), "which holds −∞"),
    "a buffer cast to −∞": (lambda m, keep, d: (m.buffer.half().to(d),), _with_row(-1e9), "puts −∞ into its mask"),
    "a logarithm": (lambda m, keep, d: (torch.log(keep.to(d)),), None, "what log makes of it is not known"),
    "a division": (lambda m, keep, d: (-1 / keep.to(d),), None, "may put −∞ into its mask"),
    "out of range": (lambda m, keep, d: (((1 - keep.half()) * -1e9).to(d),), None, "puts −∞ into its mask"),
    "twice the smallest": (lambda m, keep, d: _smallest(m, keep, d) * 2, None, "masks may add up to −∞"),
    "an unknown module's": (lambda m, keep, d: (m.other(keep.to(d)),), None, "which may put −∞ into it"),
    "a finite buffer": (lambda m, keep, d: (m.buffer.to(d),), _with_row(-1e9), None),
    "the smallest number": (_smallest, None, None),
    "chosen": (lambda m, keep, d: (torch.where(keep > 0, 0.0, -1e9).to(d),), None, None),
    "causal and padding": (
        lambda m, keep, d: (*_smallest(m, keep, d), torch.full((5, 5), torch.finfo(d).min, dtype=d).triu(1)),
        None,
        None,
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_rows_that_are_masked_as_a_whole(name):
    mask, buffer, words = MASKS[name]
    model = Added(mask, buffer)
    model.other = nn.LogSigmoid()
    keep = torch.ones(3, 5, dtype=torch.int64)
    keep[0] = 0
    inputs = tensors()[0], keep
    gm = trace(model.eval(), *inputs, dynamic=False)
    expected = copy.deepcopy(gm)(*inputs)
    FuseAttention()(gm)
    assert bool(refold.history(gm)) == (words is None), refold.result(gm)
    assert words is None or words in refold.result(gm).refused[0].reason
    assert torch.allclose(gm(*inputs), expected, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_numbers_that_are_infinite_in_float16():
    keep = torch.zeros(3, 5, dtype=torch.int64)
    for dtype in (torch.float16, torch.float32):
        inputs = tensors()[0].to(dtype), keep
        gm = trace(Added(lambda m, keep, d: ((1 - keep.to(d)) * -1e9,)), *inputs, dynamic=False)
        FuseAttention()(gm)
        assert bool(refold.history(gm)) == (dtype == torch.float32)


def test_a_module_that_was_cast_is_left_alone():
    gm = trace(Of(FUSED["biased"][0]).double(), *tensors(), dynamic=False).half()
    FuseAttention()(gm)
    assert not refold.history(gm) and "was cast since" in refold.result(gm).refused[0].reason


def test_masks_that_are_written_between_layers_are_summed_anew():
    def layers(m, q, k, v):
        mask, other = m.bias * 2, m.bias * 3
        first = (q @ k.transpose(-1, -2) + mask + other).softmax(-1) @ v
        mask.mul_(3.0)
        return first + (q @ v.transpose(-1, -2) + mask + other).softmax(-1) @ k

    inputs = tensors()
    gm = classic(Of(layers).double(), *inputs)
    expected = copy.deepcopy(gm)(*inputs)
    FuseAttention()(gm)
    assert torch.allclose(gm(*inputs), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("written", ["source", "repeated", "none"])
def test_heads_that_are_written_are_not_read_later(written):
    class Grouped(nn.Module):
        def forward(self, q, k):
            k = k * 1.5
            repeated = k.repeat_interleave(2, 1)
            if written != "none":
                (k if written == "source" else repeated).add_(torch.arange(4.0))
            return F.scaled_dot_product_attention(q, repeated, repeated) + k.sum()

    inputs = torch.randn(2, 4, 5, 4), torch.randn(2, 2, 5, 4)
    gm = classic(Grouped(), *inputs)
    expected = copy.deepcopy(gm)(*inputs)
    FuseAttention()(gm)
    assert bool(refold.history(gm)) == (written == "none")
    assert torch.allclose(gm(*inputs), expected, rtol=1e-5, atol=1e-5)


def test_other_softmaxes_are_not_mentioned():
    gm = trace(Of(lambda m, q, k, v: q.softmax(-1) * (k @ v.mT).softmax(0).sum()), *tensors(), dynamic=False)
    FuseAttention()(gm)
    assert not refold.result(gm).rewritten and not refold.result(gm).refused


def test_softmax_in_float32():
    def low(m, q, k, v):
        return F.softmax(q @ k.transpose(-1, -2), dim=-1, dtype=torch.float32).to(q.dtype) @ v

    inputs = tuple(t.bfloat16() for t in tensors())
    gm = trace(Of(low).bfloat16(), *inputs, dynamic=False)
    reference = Of(FUSED["plain"][0]).double()(*(t.double() for t in inputs))
    before = (gm(*inputs).double() - reference).abs().max()
    FuseAttention()(gm)
    assert names(gm).count("scaled_dot_product_attention") == 1 and "to" not in names(gm)
    assert (gm(*inputs).double() - reference).abs().max() <= 2 * before


def repeat(x, times):
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


@pytest.mark.parametrize("how", [repeat, lambda x, n: x.repeat_interleave(n, 1)], ids=["expanded", "interleaved"])
def test_repeated_heads(how):
    class Grouped(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, how(k, 3), how(v, 3), is_causal=True)

    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4)
    gm = trace(Grouped(), q, k, v)
    expected = gm(q, k, v)
    FuseAttention()(gm)
    assert names(gm) == ["scaled_dot_product_attention"]
    assert torch.allclose(gm(q, k, v), expected, rtol=1e-5, atol=1e-6)
    gm = FuseAttention(grouped=False)(trace(Grouped(), q, k, v))
    assert not refold.history(gm)


def test_heads_repeated_in_another_order_are_left_alone():
    class Tiled(nn.Module):
        def forward(self, q, k, v):
            tiled = k[:, None].expand(2, 3, 2, 5, 4).reshape(2, 6, 5, 4)
            return F.scaled_dot_product_attention(q, tiled, tiled)

    gm = trace(Tiled(), torch.randn(2, 6, 5, 4), torch.randn(2, 2, 5, 4), torch.randn(1), dynamic=False)
    FuseAttention()(gm)
    assert not refold.history(gm)


class ViewFarBehind(nn.Module):
    """What the attention gives is viewed in another shape after some arithmetic, which hands its layout on."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        rows, length, _ = x.shape
        query, key, value = (layer(x).view(rows, length, 2, 8).transpose(1, 2) for layer in self.layers)
        mixed = (query @ key.transpose(-1, -2) / 8**0.5).softmax(-1) @ value
        return (mixed * 2).view(rows, -1).sin()


@pytest.mark.parametrize("dynamic", ["auto", False])
def test_views_far_behind_take_any_layout(dynamic):
    model, x = ViewFarBehind().eval(), torch.randn(2, 6, 16)
    gm = trace(model, x, dynamic=dynamic)
    original = copy.deepcopy(gm)
    FuseAttention()(gm)
    assert "scaled_dot_product_attention" in {name_of(node) for node in gm.graph.nodes}
    with torch.no_grad():
        torch.testing.assert_close(gm(x), original(x))
    FuseAttention()(gm, reverse=True)
    assert gm.code == original.code
