"""FuseAttention computes the same in float64, and refuses where it would not."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import refold
from refold.capture import trace
from refold.purity import name_of
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
    "viewed": (lambda m, q, k, v: ((q @ k.transpose(-1, -2)).softmax(-1) @ v).view(6, 5, 4), 4),
}


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


REFUSED = {
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
