"""PoolByMean makes a mean of a pool with one window, and of no other."""

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
from refold.transformations.pool_by_mean import PoolByMean
from refold.verification.verifier import verify


class Of(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.pool = pool

    def forward(self, x):
        return self.pool(x.sin()).flatten(1)


X1, X2, X3 = torch.randn(2, 3, 7), torch.randn(2, 3, 7, 5), torch.randn(2, 3, 4, 5, 6)

COVERED = {
    "far too large": (nn.AvgPool2d(1280, ceil_mode=True), X2),
    "too large, pads not counted": (nn.AvgPool2d(9, ceil_mode=True, count_include_pad=False), X2),
    "just as large": (nn.AvgPool2d((7, 5)), X2),
    "just as large, small steps": (nn.AvgPool2d((7, 5), stride=1), X2),
    "along one axis": (nn.AvgPool1d(7), X1),
    "along three axes": (nn.AvgPool3d((4, 5, 6)), X3),
    "a function": (lambda x: F.avg_pool2d(x, (7, 5)), X2),
    "a function, by name": (lambda x: F.avg_pool2d(x, kernel_size=8, ceil_mode=True), X2),
    "no batch": (nn.AvgPool2d(5, ceil_mode=True), torch.randn(3, 4, 5)),
}
OTHERS = {
    "several windows": (nn.AvgPool2d(3), X2, "does not cover"),
    "along one of both axes": (nn.AvgPool2d((7, 1)), X2, "does not cover"),
    "padded": (nn.AvgPool2d((7, 5), padding=1), X2, "pads"),
    "another divisor": (nn.AvgPool2d((7, 5), divisor_override=3), X2, "number of its own"),
}


@pytest.mark.parametrize("name", COVERED)
def test_one_window_becomes_a_mean(name):
    pool, x = COVERED[name]
    model = Of(pool).eval()
    gm = trace(model, x, dynamic=False)
    before = gm.code
    expected = copy.deepcopy(model).double()(x.double())
    PoolByMean()(gm)
    assert [name_of(n) for n in gm.graph.nodes if "pool" in name_of(n) or name_of(n) == "mean"] == ["mean"]
    assert gm(x).shape == expected.shape
    assert verify(gm, x).right
    # a sum of n numbers below 1, each rounded once before, is off by at most (n + 1) roundings of n; the mean by n-th
    assert (gm(x).double() - expected).abs().max() <= (x.numel() + 1) * torch.finfo(x.dtype).eps / 2
    refold.undo(gm)
    assert gm.code == before and torch.equal(gm(x), model(x))


@pytest.mark.parametrize("name", OTHERS)
def test_other_pools_stay_and_say_why(name):
    pool, x, reason = OTHERS[name]
    gm = trace(Of(pool), x, dynamic=False)
    result = refold.explain(gm, PoolByMean())
    assert not result.rewritten and reason in str(result)
    before = gm.code
    assert PoolByMean()(gm).code == before


def test_sizes_that_are_not_known_are_not_guessed():
    gm = symbolic_trace(Of(nn.AvgPool2d(9, ceil_mode=True)))
    assert "not known" in str(refold.explain(gm, PoolByMean()))


def test_sizes_of_an_example_do_not_hold_for_every_run():
    model, x = Of(nn.AvgPool2d(4)), torch.randn(1, 2, 8, 8)
    gm = symbolic_trace(model)
    FakeTensorProp(gm).propagate(torch.randn(1, 2, 4, 4))
    PoolByMean()(gm)
    assert not refold.history(gm) and "for every run" in str(refold.result(gm))
    assert torch.equal(gm(x), copy.deepcopy(model)(x))


def test_the_batch_may_be_of_any_size():
    model = Of(nn.AvgPool2d(9, ceil_mode=True))
    gm = trace(model, X2, dynamic={"x": {0: torch.export.Dim.AUTO}})
    PoolByMean()(gm)
    assert len(refold.history(gm)) == 1
    x = torch.randn(5, 3, 7, 5)
    assert gm(x).shape == model(x).shape
