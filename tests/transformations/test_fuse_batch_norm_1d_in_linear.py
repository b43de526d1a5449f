"""FuseBatchNorm1dInLinear: both orders, and never over the wrong axis."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from checking import reasons, rewritten
from torch import nn
from torch.fx import symbolic_trace

import refold
from refold import FuseBatchNorm1dInLinear
from refold.examples import exported, settle
from refold.testing.equivalence import deviations


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("order", ["linear first", "norm first"])
def test_both_orders(order: str, affine: bool, bias: bool) -> None:
    layer = nn.Linear(5, 3, bias=bias)
    parts = (
        [layer, nn.BatchNorm1d(3, affine=affine)]
        if order == "linear first"
        else [nn.BatchNorm1d(5, affine=affine), layer]
    )
    gm = rewritten(FuseBatchNorm1dInLinear(), settle(nn.Sequential(*parts)).eval(), torch.randn(4, 5), sites=1)
    assert not any(isinstance(m, nn.BatchNorm1d) for m in gm.modules())


@pytest.mark.parametrize("order", ["linear first", "norm first"])
def test_three_dimensional_input_where_both_axes_have_one_size(order: str) -> None:
    """(N, C, L) with C = L: a plain trace cannot tell, so the folded layer looks when it runs."""
    parts = [nn.Linear(4, 4), nn.BatchNorm1d(4)] if order == "linear first" else [nn.BatchNorm1d(4), nn.Linear(4, 4)]
    model = settle(nn.Sequential(*parts)).eval().double()
    original = symbolic_trace(model)
    folded = FuseBatchNorm1dInLinear()(copy.deepcopy(original))
    for shape in ((2, 4, 4), (3, 4)):
        assert list(deviations(original, folded, (torch.randn(shape, dtype=torch.float64),))) == []


def test_three_dimensional_input_that_is_known_is_refused() -> None:
    model = settle(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).eval()
    gm, _ = exported((model, (torch.randn(2, 4, 4),)))
    assert "axis 1 of a 3-D value" in reasons(FuseBatchNorm1dInLinear(), gm, torch.randn(2, 4, 4))


def test_a_known_two_dimensional_input_needs_no_look_at_run_time() -> None:
    model = settle(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).eval()
    gm, _ = exported((model, (torch.randn(3, 4),)))
    gm = rewritten(FuseBatchNorm1dInLinear(), gm, torch.randn(3, 4), sites=1)
    assert torch.ops.aten.linear.default in [n.target for n in gm.graph.nodes]
    assert [name for name, _ in gm.named_parameters()] == ["0.weight", "0.bias"]


def test_another_number_of_channels_is_refused() -> None:
    model = settle(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(3))).eval()
    assert "another axis" in reasons(FuseBatchNorm1dInLinear(), model, torch.randn(2, 3, 4))


def test_training_mode_and_missing_statistics_are_refused() -> None:
    gm = symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    FuseBatchNorm1dInLinear()(gm)
    assert "training mode" in str(refold.result(gm)) and not refold.history(gm)
    bare = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()
    assert "no running statistics" in reasons(FuseBatchNorm1dInLinear(), bare, torch.randn(3, 4))


class Shares(nn.Module):
    """Calls its linear and its norm as often as told."""

    def __init__(self, linears: int, norms: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.counts = linears, norms
        settle(self).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.counts[0]):
            x = self.linear(x)
        for _ in range(self.counts[1]):
            x = self.norm(x)
        return x


@pytest.mark.parametrize("counts", [(2, 1), (1, 2)])
def test_used_twice_is_refused(counts: tuple[int, int]) -> None:
    text = reasons(FuseBatchNorm1dInLinear(), Shares(*counts), torch.randn(3, 4))
    assert "more than once" in text or "no linear layer" in text


def test_norm_between_two_linears_goes_into_one() -> None:
    model = settle(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))).eval()
    rewritten(FuseBatchNorm1dInLinear(), model, torch.randn(3, 4), sites=1)


def test_linear_between_two_norms_takes_both() -> None:
    model = settle(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))).eval()
    gm, _ = exported((model, (torch.randn(3, 4),)))
    gm = rewritten(FuseBatchNorm1dInLinear(), gm, torch.randn(3, 4))
    assert torch.ops.aten.batch_norm.default not in [n.target for n in gm.graph.nodes]


def test_linear_between_two_norms_of_unknown_rank() -> None:
    model = settle(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))).eval()
    rewritten(FuseBatchNorm1dInLinear(), model, torch.randn(3, 4))
    rewritten(FuseBatchNorm1dInLinear(), model, torch.randn(3, 4, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    model = settle(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))).eval().to(dtype)
    rewritten(FuseBatchNorm1dInLinear(), model, torch.randn(3, 4, dtype=dtype), sites=1)


def test_functions() -> None:
    class Functions(Shares):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = self.norm
            y = F.linear(x, self.linear.weight, self.linear.bias)
            return F.batch_norm(y, n.running_mean, n.running_var, weight=n.weight, bias=n.bias, eps=n.eps)

    rewritten(FuseBatchNorm1dInLinear(), Functions(1, 1), torch.randn(3, 4), sites=1)


def test_a_dead_channel_of_unknown_rank_is_refused() -> None:
    model = settle(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).eval()
    with torch.no_grad():
        model[1].weight[2] = 0
    assert "one of its scales is 0" in reasons(FuseBatchNorm1dInLinear(), model, torch.randn(3, 4))


@pytest.mark.parametrize("how", ["symbolic", "exported"])
@pytest.mark.parametrize("order", ["lnnl", "lnln", "nnln", "lnnn"])
def test_norms_in_a_row(order: str, how: str) -> None:
    parts = [nn.Linear(4, 4) if letter == "l" else nn.BatchNorm1d(4) for letter in order]
    model: nn.Module = settle(nn.Sequential(*parts)).eval()
    model = exported((model, (torch.randn(3, 4),)))[0] if how == "exported" else model
    gm = rewritten(FuseBatchNorm1dInLinear(), model, torch.randn(3, 4))
    # where the rank is not known, a layer that looks at it when it runs takes one norm alone
    most = order.count("n") if how == "exported" else min(order.count("n"), order.count("l"))
    assert len(refold.result(gm).rewritten) == most


def test_a_norm_whose_input_is_written_before_the_layer_runs_is_refused() -> None:
    class Writes(Shares):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            x = x * 1.5
            normed = self.norm(x)
            x.add_(1)
            return self.linear(normed), x

    text = reasons(FuseBatchNorm1dInLinear(), Writes(1, 1), torch.randn(3, 4))
    assert "writes into what its batch norm reads" in text


def test_a_layer_that_reads_its_own_weight_is_refused() -> None:
    class OwnWeight(Shares):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.norm(self.linear(self.linear.weight))

    assert "is also its input" in reasons(FuseBatchNorm1dInLinear(), OwnWeight(1, 1), torch.randn(4, 4))


def test_weights_that_would_overflow_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, eps=1e-7)).eval()
    nn.init.constant_(model[0].weight, 100.0)
    model[1].running_var.fill_(1e-6)
    assert "finite" in reasons(FuseBatchNorm1dInLinear(), model.half(), torch.full((1, 2), 1e-4).half())
