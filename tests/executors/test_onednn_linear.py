"""Linear layers by oneDNN give what torch gives: the same error class, NaN and infinities; the weights of now."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import refold
from refold.errors import PreparationFailed
from refold.executors.onednn_linear import why_no_onednn, with_onednn_linears

pytestmark = pytest.mark.skipif(
    why_no_onednn(torch.device("cpu")) is not None, reason=f"oneDNN: {why_no_onednn(torch.device('cpu'))}"
)


class Rows(nn.Module):
    """A layer as GPT-2 has it: the weight as (inputs, outputs)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(64, 96)), nn.Parameter(torch.randn(96))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.reshape(-1, 64), self.weight).view(*x.shape[:-1], 96)


MODELS: dict[str, Any] = {
    "layer": lambda: nn.Linear(64, 96),
    "no bias": lambda: nn.Linear(64, 96, bias=False),
    "two and an activation": lambda: nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)),
    "rows of a matrix": Rows,
}


def lowered(model: nn.Module, x: torch.Tensor) -> nn.Module:
    gm = with_onednn_linears(refold.trace(copy.deepcopy(model).eval(), x))
    assert "mkldnn" in gm.code
    return gm


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_the_error_is_that_of_torch(name: str, rows: int) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(2, rows, 64)
    run = lowered(model, torch.randn(2, 5, 64))
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        own = torch.linalg.vector_norm(model(x).double() - exact)
        its = torch.linalg.vector_norm(run(x).double() - exact)
    assert its <= 4 * own, (its, own)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinities_stand_where_torch_has_them(value: float) -> None:
    model, x = MODELS["two and an activation"](), torch.randn(3, 4, 64)
    x[1, 2, 5] = value
    with torch.no_grad():
        expected, given = model(x), lowered(model, x)(x)
    assert torch.equal(expected.isnan(), given.isnan())
    assert torch.equal(expected.isinf(), given.isinf())


def test_strided_and_empty_inputs() -> None:
    model = MODELS["layer"]()
    run = lowered(model, torch.randn(4, 6, 64))
    x = torch.randn(64, 6, 4).permute(2, 1, 0)
    with torch.no_grad():
        assert (run(x) - model(x)).abs().max() < 1e-5
        assert run(x).stride() == model(x).stride()


def test_weights_of_now_are_read() -> None:
    model, x = MODELS["layer"](), torch.randn(2, 3, 64)
    gm = refold.trace(model, x)
    run = with_onednn_linears(gm)
    with torch.no_grad():
        before = run(x)
        model.weight.mul_(2)
        assert not torch.equal(run(x), before)
        assert (run(x) - model(x)).abs().max() < 1e-5


def test_what_oneDNN_does_not_compute_is_left_alone() -> None:
    for model, x in ((nn.ReLU(), torch.randn(2, 8)), (nn.Linear(64, 96).double(), torch.randn(2, 64).double())):
        with pytest.raises(PreparationFailed, match="no linear layer"):
            with_onednn_linears(refold.trace(model, x))


def test_an_optimized_model_runs_so() -> None:
    model = MODELS["two and an activation"]().eval()
    fast = refold.optimize(model, torch.randn(4, 5, 64), backend="onednn", progress=False)
    with torch.no_grad():
        x = torch.randn(4, 5, 64)
        assert (fast(x) - model(x)).abs().max() < 1e-5
    assert not fast.notes
