"""FoldBatchNorm is exact in float64 for every kind of layer, on both sides, and refuses where it would not be."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import symbolic_trace

import refold
import refold.capture
from refold.testing.equivalence import deviations
from refold.testing.models import settle
from refold.transformations.fold_batch_norm import FoldBatchNorm

C = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
T = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
B = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def image(channels, dims):
    return torch.randn(2, channels, *[5] * dims, dtype=torch.float64)


def behind(dims, transposed, groups, bias, affine=True):
    layer = (T if transposed else C)[dims](4, 6, 3, stride=2, padding=1, groups=groups, bias=bias)
    return nn.Sequential(layer, B[dims](6, affine=affine)), image(4, dims)


def before(dims, bias, **settings):
    return nn.Sequential(B[dims](4), C[dims](4, 6, 3, bias=bias, **settings)), image(4, dims)


EXACT = {
    f"{'transposed ' if t else ''}{d}d, groups={g}, bias={b}": behind(d, t, g, b)
    for d in (1, 2, 3)
    for t in (False, True)
    for g, b in ((1, True), (2, False))
}
EXACT |= {
    "without an affine map": behind(2, True, 2, True, affine=False),
    "before 1d": before(1, True),
    "before 2d": before(2, False, stride=2),
    "before 3d": before(3, True, dilation=2),
    "before valid": before(2, True, padding="valid"),
    "before mirrored": before(2, True, padding=1, padding_mode="reflect"),
    "before circular": before(2, False, padding=1, padding_mode="circular"),
    "linear": (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), torch.randn(3, 4, dtype=torch.float64)),
    "before linear": (nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6)), torch.randn(3, 4, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_in_float64(name):
    torch.manual_seed(0)
    model, x = EXACT[name]
    model = settle(copy.deepcopy(model)).double().eval()
    reference = copy.deepcopy(model)
    gm = FoldBatchNorm()(symbolic_trace(model))
    assert not any(isinstance(m, tuple(B.values())) for m in gm.modules())
    assert not list(deviations(symbolic_trace(reference), gm, (x,)))
    restored = refold.undo(gm)
    for (name, old), (_, new) in zip(reference.state_dict().items(), restored.state_dict().items(), strict=True):
        assert torch.equal(old, new), name


@pytest.mark.parametrize("name", ["transposed 2d, groups=2, bias=False", "before 3d", "before 1d"])
def test_what_was_trained_is_carried_back(name):
    torch.manual_seed(0)
    model, x = EXACT[name]
    gm = FoldBatchNorm()(symbolic_trace(settle(copy.deepcopy(model)).double().eval()))
    weight = next(p for n, p in gm.named_parameters() if n.endswith("weight"))
    with torch.no_grad():
        weight.add_(torch.randn_like(weight))
    folded = copy.deepcopy(gm)
    assert not list(deviations(refold.undo(gm), folded, (x,)))


def test_functions_and_exported_graphs():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)

        def forward(self, x):
            y = F.conv_transpose2d(x, self.conv.weight, self.conv.bias, stride=2, groups=2, padding=1)
            n = self.norm
            return F.batch_norm(y, n.running_mean, n.running_var, n.weight, n.bias, eps=n.eps)

    model = settle(Functional()).double().eval()
    x = image(4, 2)
    reference = copy.deepcopy(model)
    gm = torch.export.export(model, (x,), strict=False).module()
    FoldBatchNorm()(gm)
    assert not any("batch_norm" in str(n.target) for n in gm.graph.nodes)
    assert not list(deviations(symbolic_trace(reference), gm, (x,)))


def test_rows_between():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            y = self.linear(x)
            return self.norm(y.flatten(0, 1)).reshape_as(y)

    model = settle(Rows()).double().eval()
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    reference = copy.deepcopy(model)
    gm = refold.capture.trace(model, x)
    FoldBatchNorm()(gm)
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == ["linear"]
    for values in (x, torch.randn(3, 7, 3, dtype=torch.float64)):
        assert not list(deviations(symbolic_trace(reference), gm, (values,)))


def refusal(model, **settings):
    gm = symbolic_trace(settle(model).eval())
    FoldBatchNorm(**settings)(gm)
    assert not refold.history(gm)
    return refold.result(gm).refused[0].reason


def test_refusals():
    assert "pads with zeros" in refusal(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding=1)))
    assert "pads with zeros" in refusal(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding="same")))
    assert "grouped" in refusal(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, groups=2)))
    assert "at its borders" in refusal(nn.Sequential(nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 6, 3)))
    assert "no convolution or linear layer" in refusal(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.BatchNorm2d(4)))
    training = symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))
    FoldBatchNorm()(training)
    assert "in training mode" in refold.result(training).refused[0].reason


def test_rank_that_does_not_fit():
    class Line(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(self.linear(x))

    x = torch.randn(2, 4, 3)
    gm = refold.capture.trace(settle(Line()).eval(), x)
    FoldBatchNorm()(gm)
    assert "axis 1 of a 3-D value" in refold.result(gm).refused[0].reason
