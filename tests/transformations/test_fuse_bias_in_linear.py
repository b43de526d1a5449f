"""FuseBiasInLinear: any dtype and leading shape, shared modules, one-output layers, many layers on one input."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from checking import reasons, rewritten, targets
from torch import nn
from torch.fx import symbolic_trace

import refold
from refold import FuseBiasInLinear
from refold.examples import exported


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_ones_have_the_dtype_of_the_input(dtype: torch.dtype) -> None:
    gm = rewritten(FuseBiasInLinear(), nn.Sequential(nn.Linear(4, 3)).to(dtype), torch.randn(2, 4, dtype=dtype))
    assert gm(torch.randn(2, 4, dtype=dtype)).dtype == dtype


def test_the_ones_have_the_device_of_the_input() -> None:
    gm = symbolic_trace(nn.Sequential(nn.Linear(4, 3)))
    FuseBiasInLinear()(gm)
    assert gm.to("meta")(torch.empty(2, 4, device="meta")).device.type == "meta"


@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 3, 4), (1, 2, 3, 4), (0, 4)])
def test_any_leading_shape(shape: tuple[int, ...]) -> None:
    rewritten(FuseBiasInLinear(), nn.Sequential(nn.Linear(4, 3)), torch.randn(shape))


def test_dynamic_batch_of_an_exported_graph() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.randn(2, 4)
    batch = torch.export.Dim("batch", min=2, max=64)
    gm = torch.export.export(model, (x,), dynamic_shapes=({0: batch},), strict=False).module()
    rewritten(FuseBiasInLinear(), gm, x, sites=1)
    FuseBiasInLinear()(gm)
    other = torch.randn(17, 4)
    torch.testing.assert_close(gm(other), model(other))


def test_shared_modules_are_left_alone() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))

    assert "called more than once" in reasons(FuseBiasInLinear(), Twice(), torch.randn(2, 4))


def test_shared_weights_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert "also registered as" in reasons(FuseBiasInLinear(), model, torch.randn(2, 4))


def test_one_output() -> None:
    gm = rewritten(FuseBiasInLinear(), nn.Sequential(nn.Linear(4, 1)), torch.randn(2, 4), sites=1)
    assert gm.get_submodule("0").weight.shape == (1, 5)


def test_one_input() -> None:
    rewritten(FuseBiasInLinear(), nn.Sequential(nn.Linear(1, 3)), torch.randn(2, 1), sites=1)


def test_layers_without_a_bias_are_left_alone() -> None:
    text = reasons(FuseBiasInLinear(), nn.Sequential(nn.Linear(4, 3, bias=False)), torch.randn(2, 4))
    assert "it has no bias" in text


def test_a_frozen_bias_is_not_mixed_with_a_trainable_weight() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].bias.requires_grad_(False)
    assert "frozen" in reasons(FuseBiasInLinear(), model, torch.randn(2, 4))


class Siblings(nn.Module):
    """Many linears on one input."""

    def __init__(self, count: int, write: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        total = self.layers[0](x)
        for layer in self.layers[1:]:
            if self.write:
                x.add_(1)
            total = total + layer(x)
        return total


def test_siblings_share_one_padded_input() -> None:
    gm = rewritten(FuseBiasInLinear(), Siblings(3), torch.randn(2, 2), sites=3)
    assert targets(gm).count("pad") == 1


def test_siblings_with_a_write_between_do_not_share_it() -> None:
    gm = rewritten(FuseBiasInLinear(), Siblings(3, write=True), torch.randn(2, 2), sites=3)
    assert targets(gm).count("pad") == 3


def test_two_thousand_siblings_in_linear_time() -> None:
    def seconds(count: int) -> float:
        gm = symbolic_trace(Siblings(count))
        start = time.process_time()
        FuseBiasInLinear()(gm)
        refold.undo(gm)
        return time.process_time() - start

    seconds(10)
    # sixteen times as many layers: 16 times the time if linear, 256 times if quadratic; √(16·256) = 64 lies between
    assert seconds(2000) < 64 * seconds(125)


@pytest.mark.parametrize("how", ["function", "aten"])
def test_functions_and_aten_operators(how: str) -> None:
    class Functions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, weight=self.layer.weight, bias=self.layer.bias)

    model, x = Functions(), torch.randn(2, 4)
    gm = rewritten(FuseBiasInLinear(), exported((model, (x,)))[0] if how == "aten" else model, x, sites=1)
    assert [tuple(p.shape) for p in gm.parameters()] == [(3, 5)]


def test_mode_is_kept() -> None:
    gm = FuseBiasInLinear()(symbolic_trace(nn.Sequential(nn.Linear(4, 3)).eval()))
    assert not any(m.training for m in gm.modules() if isinstance(m, nn.Linear))


def test_a_layer_that_reads_its_own_weight_is_left_alone() -> None:
    class Gram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + F.linear(self.layer.weight, self.layer.weight, self.layer.bias)

    assert "is also its input" in reasons(FuseBiasInLinear(), Gram(), torch.randn(5, 5))
