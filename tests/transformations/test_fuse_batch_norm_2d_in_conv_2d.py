"""FuseBatchNorm2dInConv2d: every convolution and every batch norm that can be folded, and the refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from checking import reasons, rewritten
from torch import nn
from torch.fx import symbolic_trace
from torch.fx.passes.shape_prop import ShapeProp

import refold
from refold import FuseBatchNorm2dInConv2d
from refold.examples import exported, settle


def conv_norm(conv: nn.Module, norm: nn.Module | None = None) -> nn.Sequential:
    return settle(nn.Sequential(conv, norm or nn.BatchNorm2d(4))).eval()  # type: ignore[return-value]


IMAGE = (2, 4, 6, 6)
CONVS = {
    "with a bias": nn.Conv2d(4, 4, 3),
    "without a bias": nn.Conv2d(4, 4, 3, bias=False),
    "grouped": nn.Conv2d(4, 4, 3, groups=2),
    "depthwise": nn.Conv2d(4, 4, 3, groups=4, bias=False),
    "dilated": nn.Conv2d(4, 4, 2, dilation=2),
    "padded": nn.Conv2d(4, 4, 3, padding=1),
    "padded by reflection": nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    "padding='same'": nn.Conv2d(4, 4, 3, padding="same"),
    "strided": nn.Conv2d(4, 4, 3, stride=2),
    "of one pixel": nn.Conv2d(4, 4, 1),
}


@pytest.mark.parametrize("conv", CONVS)
def test_convolutions(conv: str) -> None:
    gm = rewritten(FuseBatchNorm2dInConv2d(), conv_norm(CONVS[conv]), torch.randn(IMAGE), sites=1)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in gm.modules())
    assert gm.get_submodule("0").bias is not None


def test_the_bias_of_the_convolution_is_scaled() -> None:
    model = conv_norm(nn.Conv2d(4, 4, 1))
    gm = FuseBatchNorm2dInConv2d()(symbolic_trace(model))
    norm = model[1]
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    bias = scale * (model[0].bias.double() - norm.running_mean.double()) + norm.bias.double()
    assert torch.equal(gm.get_submodule("0").bias, bias.float())


@pytest.mark.parametrize("eps", [1e-5, 1e-3, 0.5])
def test_affine_false_and_any_epsilon(eps: float) -> None:
    model = conv_norm(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, affine=False, eps=eps))
    rewritten(FuseBatchNorm2dInConv2d(), model, torch.randn(IMAGE), sites=1)


def test_without_running_statistics() -> None:
    model = conv_norm(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))
    assert "no running statistics" in reasons(FuseBatchNorm2dInConv2d(), model, torch.randn(IMAGE))


def test_training_mode_is_refused() -> None:
    model = conv_norm(nn.Conv2d(4, 4, 3)).train()
    gm = symbolic_trace(model)
    FuseBatchNorm2dInConv2d()(gm)
    assert "training mode" in str(refold.result(gm)) and not refold.history(gm)


class Shares(nn.Module):
    """Calls its convolution and its norm as often as told."""

    def __init__(self, convs: int, norms: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.counts = convs, norms
        settle(self).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.counts[0]):
            x = self.conv(x)
        for _ in range(self.counts[1]):
            x = self.norm(x)
        return x


@pytest.mark.parametrize("counts", [(2, 1), (1, 2)])
def test_used_twice_is_refused(counts: tuple[int, int]) -> None:
    assert "called more than once" in reasons(FuseBatchNorm2dInConv2d(), Shares(*counts), torch.randn(IMAGE))


def test_an_output_that_others_read_is_refused() -> None:
    class Reads(Shares):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return self.norm(y) + y

    assert "also read by add" in reasons(FuseBatchNorm2dInConv2d(), Reads(1, 1), torch.randn(IMAGE))


def test_an_affine_weight_that_others_read_is_refused() -> None:
    class Reads(Shares):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.conv(x)) + self.norm.weight.sum()

    assert "also read by" in reasons(FuseBatchNorm2dInConv2d(), Reads(1, 1), torch.randn(IMAGE))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_convolution_with_float32_norm_keeps_its_dtype(dtype: torch.dtype) -> None:
    model = conv_norm(nn.Conv2d(4, 4, 1)).to(dtype)
    model[1].float()
    x = torch.randn(IMAGE, dtype=dtype)
    gm = symbolic_trace(model)
    expected = gm(x)
    FuseBatchNorm2dInConv2d()(gm)
    assert {p.dtype for p in gm.parameters()} == {dtype} and gm(x).dtype == expected.dtype == dtype
    refold.undo(gm)
    assert torch.equal(gm(x), expected)
    assert gm.get_submodule("1").weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    rewritten(FuseBatchNorm2dInConv2d(), conv_norm(nn.Conv2d(4, 4, 3)).to(dtype), torch.randn(IMAGE, dtype=dtype))


def test_zero_scales_come_back() -> None:
    model = conv_norm(nn.Conv2d(4, 4, 3))
    with torch.no_grad():
        model[1].weight[1:3] = 0
    gm = symbolic_trace(model)
    expected = [p.detach().clone() for p in gm.parameters()]
    FuseBatchNorm2dInConv2d()(gm)
    refold.undo(gm)
    assert all(map(torch.equal, expected, gm.parameters()))


def test_changed_weights_of_a_dead_channel_are_refused() -> None:
    model = conv_norm(nn.Conv2d(4, 4, 3))
    with torch.no_grad():
        model[1].weight[1] = 0
    gm = symbolic_trace(model)
    FuseBatchNorm2dInConv2d()(gm)
    with torch.no_grad():
        gm.get_submodule("0").weight.add_(1)
    code = gm.code
    with pytest.raises(refold.WeightsChanged, match=r"scale of 0.*weights='original'"):
        refold.undo(gm)
    assert gm.code == code and len(refold.history(gm)) == 1


class Functions(Shares):
    """As functions, with any padding."""

    padding: int | str = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(x, self.conv.weight, self.conv.bias, padding=self.padding)
        n = self.norm
        return F.batch_norm(y, n.running_mean, n.running_var, n.weight, n.bias, False, 0.1, n.eps)


@pytest.mark.parametrize("how", ["function", "aten"])
@pytest.mark.parametrize("padding", [1, "same"])
def test_functions_and_aten_operators(how: str, padding: int | str) -> None:
    model, x = Functions(1, 1), torch.randn(IMAGE)
    model.padding = padding
    if how == "aten":
        gm = exported((model, (x,)))[0]
    else:
        gm = symbolic_trace(model)
        ShapeProp(gm).propagate(x)
    gm = rewritten(FuseBatchNorm2dInConv2d(), gm, x, sites=1)
    assert [name for name, _ in gm.named_parameters()] == ["conv.weight", "conv.bias"]


def test_without_a_batch_the_function_runs_over_another_axis() -> None:
    x = torch.randn(4, 4, 4)
    assert "rank of its input is not known" in reasons(FuseBatchNorm2dInConv2d(), Functions(1, 1), x)
    gm, _ = exported((Functions(1, 1), (x,)))
    assert "axis 1 of a 3-D value" in reasons(FuseBatchNorm2dInConv2d(), gm, x)


def test_a_chain_without_anything_between() -> None:
    parts = [nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)]
    model, x = settle(nn.Sequential(*parts)).eval(), torch.randn(IMAGE)
    rewritten(FuseBatchNorm2dInConv2d(), model, x, sites=3)
    rewritten(FuseBatchNorm2dInConv2d(), exported((model, (x,)))[0], x, sites=3)


def test_a_convolution_that_reads_its_own_weight_is_refused() -> None:
    class OwnWeight(Shares):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.norm(self.conv(self.conv.weight))

    assert "is also its input" in reasons(FuseBatchNorm2dInConv2d(), OwnWeight(1, 1), torch.randn(4, 4, 1, 1))


def test_weights_that_would_overflow_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1, eps=1e-7)).eval()
    nn.init.constant_(model[0].weight, 100.0)
    model[1].running_var.fill_(1e-6)
    assert "finite" in reasons(FuseBatchNorm2dInConv2d(), model.half(), torch.full((1, 1, 1, 1), 1e-4).half())


def test_mode_and_requires_grad_are_kept() -> None:
    model = conv_norm(nn.Conv2d(4, 4, 3)).requires_grad_(False)
    gm = FuseBatchNorm2dInConv2d()(symbolic_trace(model))
    assert not any(p.requires_grad for p in gm.parameters()) and not gm.get_submodule("0").training


def test_switching_to_training_while_folded_is_kept_by_undo() -> None:
    gm = FuseBatchNorm2dInConv2d()(symbolic_trace(conv_norm(nn.Conv2d(4, 4, 3))))
    gm.train()
    refold.undo(gm)
    assert all(m.training for m in gm.modules())


def test_a_norm_without_a_convolution_says_so() -> None:
    text = reasons(FuseBatchNorm2dInConv2d(), nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4)).eval(), torch.randn(IMAGE))
    assert "is not a 2-D convolution" in text
