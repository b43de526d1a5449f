"""SplitUpsampling: convolutions behind nearest upsampling in every form; what is not exact stays and says why."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import symbolic_trace

import refold
from refold import SplitUpsampling, trace, verify
from refold.errors import WeightsChanged
from refold.fingerprint import same_bits
from refold.graph.targets import name_of


class Of(nn.Module):
    """An upsampling (a module or a function) and a convolution behind it."""

    def __init__(self, up, conv):
        super().__init__()
        self.up, self.conv = up, conv

    def forward(self, x):
        return self.conv(self.up(x))


def is_up(node):
    return "upsample" in name_of(node) or "interpolate" in name_of(node)


torch.manual_seed(0)
X1, X2, X3 = torch.randn(2, 3, 5), torch.randn(2, 3, 4, 5), torch.randn(1, 3, 2, 3, 4)
DOUBLED = nn.Upsample(scale_factor=(2, 2))
SAME = {
    "a module": (nn.Upsample(scale_factor=2), nn.Conv2d(3, 4, 3, padding=1), X2),
    "a module for images": (nn.UpsamplingNearest2d(scale_factor=2), nn.Conv2d(3, 4, 3, padding="same"), X2),
    "a function, all by name": (
        lambda x: F.interpolate(input=x, size=None, scale_factor=[2.0, 2.0], mode="nearest-exact"),
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        X2,
    ),
    "a size that is computed": (
        lambda x: F.interpolate(x, size=(x.shape[2] * 2, x.shape[3] * 4)),
        nn.Conv2d(3, 4, 3, padding=1),
        X2,
    ),
    "a scale that is computed again": (
        lambda x: F.interpolate(x, scale_factor=2, recompute_scale_factor=True),
        nn.Conv2d(3, 4, 3, padding=1),
        X2,
    ),
    "no padding": (DOUBLED, nn.Conv2d(3, 4, 3, padding="valid"), X2),
    "as much padding as can be": (DOUBLED, nn.Conv2d(3, 4, 3, padding=2), X2),
    "an even kernel": (DOUBLED, nn.Conv2d(3, 4, 4, padding=(1, 3)), X2),
    "wide kernels": (DOUBLED, nn.Conv2d(3, 4, (5, 7), padding=(2, 3)), X2),
    "one axis": (nn.Upsample(scale_factor=(1, 4)), nn.Conv2d(3, 4, (1, 3), padding=(0, 1)), X2),
    "by four and by eight": (nn.Upsample(scale_factor=(4, 8)), nn.Conv2d(3, 2, (3, 2), padding=(1, 0)), X2),
    "a line": (nn.Upsample(scale_factor=2), nn.Conv1d(3, 4, 3, padding=1), X1),
    "a cube": (nn.Upsample(scale_factor=(1, 2, 2)), nn.Conv3d(3, 2, 3, padding=1), X3),
    "one pixel": (DOUBLED, nn.Conv2d(3, 4, 3, padding=1), X2[:, :, :1, :1]),
    "pixels last in memory": (DOUBLED, nn.Conv2d(3, 4, 3, padding=1), X2.to(memory_format=torch.channels_last)),
}


@pytest.mark.parametrize("name", SAME)
def test_the_convolution_runs_on_the_small_image(name):
    up, conv, x = SAME[name]
    model, x = Of(up, copy.deepcopy(conv).double()), x.double()
    open_sizes = x.shape[-1] > 1
    shapes = {"x": dict.fromkeys(range(2, x.dim()), torch.export.Dim.AUTO)}
    gm = trace(model, x, dynamic=shapes if open_sizes else False)
    before, state = gm.code, copy.deepcopy(model.state_dict())
    SplitUpsampling()(gm)
    assert not any(map(is_up, gm.graph.nodes)) and type(gm.conv).__name__.startswith("ConvTranspose")
    for given in [x, torch.cat([x, x], -1).flip(1)] if open_sizes else [x]:
        torch.testing.assert_close(gm(given), model(given), rtol=1e-12, atol=1e-12)
        assert gm(given).stride() == model(given).stride()
    assert verify(gm, x).right
    assert same_bits(model.conv.weight, state["conv.weight"]), "the model that was traced is never changed"
    refold.undo(gm)
    assert gm.code == before and torch.equal(gm(x), model(x))
    assert all(same_bits(tensor, state[key]) for key, tensor in gm.state_dict().items())


OTHERS = {
    "between neighbours": (nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(3, 4, 3), "bilinear"),
    "by three": (nn.Upsample(scale_factor=3), nn.Conv2d(3, 4, 3), "enlarges by (3.0, 3.0)"),
    "by one and a half": (nn.Upsample(scale_factor=1.5), nn.Conv2d(3, 4, 3), "enlarges by (1.5, 1.5)"),
    "to a size that is no multiple": (nn.Upsample(size=(9, 10)), nn.Conv2d(3, 4, 3), "9 of 4"),
    "a single tap": (DOUBLED, nn.Conv2d(3, 4, 1), "no products are saved"),
    "a stride": (DOUBLED, nn.Conv2d(3, 4, 3, stride=2), "stride"),
    "a dilation": (DOUBLED, nn.Conv2d(3, 4, 3, dilation=2), "dilation"),
    "groups": (DOUBLED, nn.Conv2d(3, 3, 3, groups=3), "grouped"),
    "a mirror": (DOUBLED, nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), "else than zeros"),
    "more padding than taps": (DOUBLED, nn.Conv2d(3, 4, 3, padding=3), "as much as its kernel"),
    "an even kernel padded to the same": (DOUBLED, nn.Conv2d(3, 4, 2, padding="same"), "on one side"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay_and_say_why(name):
    up, conv, reason = OTHERS[name]
    gm = trace(Of(up, conv), X2, dynamic=False)
    before = gm.code
    SplitUpsampling()(gm)
    assert gm.code == before and reason in str(refold.result(gm))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.other = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.other.weight = self.conv.weight

    def forward(self, x):
        return self.conv(F.interpolate(x, scale_factor=(2, 2))) + self.other(x).sum()


class Computed(nn.Module):
    def forward(self, x, weight):
        return F.conv2d(F.interpolate(x, scale_factor=(2, 2)), weight * 2)


class Written(Shared):
    def forward(self, x):
        x = x + 1
        large = F.interpolate(x, scale_factor=(2, 2))
        x.mul_(2)
        return self.other(large), x


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Shared(), "registered as other.weight"),
        (Computed(), "computed, not a parameter"),
        (Written(), "mul_ writes into add"),
        (Of(nn.Upsample(scale_factor=2), nn.Conv2d(3, 4, 3)), "the rank of what is upsampled is not known"),
        (Of(nn.Upsample(size=(8, 8)), nn.Conv2d(3, 4, 3)), "not proven"),
    ],
)
def test_what_is_not_its_own_or_not_known_stays(model, reason):
    gm = symbolic_trace(model)
    SplitUpsampling()(gm)
    assert reason in str(refold.result(gm)) and not refold.history(gm)


def test_others_may_read_the_large_image():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.left, self.right = DOUBLED, nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x):
            y = self.up(x)
            return self.left(y) + self.right(y) + y.sum()

    model = Both().double()
    gm = symbolic_trace(model)
    SplitUpsampling()(gm)
    assert len(refold.result(gm).rewritten) == 2 and sum(node.target == "up" for node in gm.graph.nodes) == 1
    torch.testing.assert_close(gm(X2.double()), model(X2.double()), rtol=1e-12, atol=1e-12)


def doubled(dtype=torch.float32, channels=3):
    torch.manual_seed(1)
    return symbolic_trace(Of(DOUBLED, nn.Conv2d(channels, channels, 3, padding=1)).to(dtype))


def test_what_is_no_sum_any_more_is_refused_and_the_original_is_known():
    gm, before = doubled(), doubled().conv.weight
    SplitUpsampling(keep="original")(gm)
    gm(X2).square().sum().backward()
    torch.optim.SGD(gm.parameters(), lr=1e-3).step()
    trained = copy.deepcopy(gm.state_dict())
    with pytest.raises(WeightsChanged, match=r"conv.weight .* no longer made of sums .* weights='original'"):
        refold.undo(gm)
    with pytest.raises(WeightsChanged, match="no longer made of sums"):
        refold.original_state_dict(gm)
    assert all(same_bits(tensor, trained[name]) for name, tensor in gm.state_dict().items())
    refold.undo(gm, weights="original")
    assert same_bits(gm.conv.weight, before) and same_bits(gm.conv.bias, trained["conv.bias"])


def test_sums_that_were_changed_come_back_and_the_rest_bit_for_bit():
    gm, before = doubled(), doubled().conv.weight
    SplitUpsampling()(gm)
    with torch.no_grad():
        gm.conv.weight[:, 1] *= 1.7
    refold.undo(gm)
    assert same_bits(gm.conv.weight[::2], before[::2])
    error = (gm.conv.weight[1].double() - before[1].double() * 1.7).abs().max()
    assert error <= 8 * torch.finfo(torch.float32).eps * before.abs().max()


def test_gradients_come_back_by_the_chain_rule():
    gm, reference = doubled(torch.float64), doubled(torch.float64)
    SplitUpsampling()(gm)
    for module in (gm, reference):
        module(X2.double()).sin().sum().backward()
    refold.undo(gm)
    torch.testing.assert_close(gm.conv.weight.grad, reference.conv.weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.09), (torch.float64, 0.09), (torch.bfloat16, 0.12)])
def test_the_record_of_a_usual_kernel_is_small(dtype, share):
    gm = doubled(dtype, 64)
    size = gm.conv.weight.numel() * dtype.itemsize
    SplitUpsampling()(gm)
    assert refold.history(gm)[0].maps[0].nbytes <= share * size


def test_sums_that_are_not_finite_are_refused():
    gm = doubled()
    with torch.no_grad():
        gm.conv.weight[0, 0, 0, 0] = 1e38
    SplitUpsampling()(gm)
    assert not refold.history(gm) and "may not be finite in torch.float32" in str(refold.result(gm))


def test_half_precision_only_where_products_are_summed_in_float32(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    gm = doubled(torch.bfloat16)
    SplitUpsampling()(gm)
    assert not refold.history(gm) and "rounded to torch.bfloat16" in str(refold.result(gm))
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    SplitUpsampling()(gm)
    assert refold.history(gm)
