"""Weight maps: exact corrections of a few per cent, training that comes back, refusals where it cannot."""

from __future__ import annotations

import copy
import gc
import json
from typing import Any

import pytest
import torch
from torch import nn

import refold
from refold.errors import WeightsChanged
from refold.fingerprint import same_bits
from refold.testing.equivalence import deviations
from refold.weights import (
    AddLowRank,
    AppendColumn,
    Concatenate,
    ConcatenateBlocks,
    Fill,
    FoldBatchNormInLayer,
    Operation,
    Pad,
    Permute,
    Rename,
    Reshape,
    Scale,
    Slice,
    SumTaps,
    Transpose,
)
from refold.weights.maps import WeightMap, apply_map

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHARE = {torch.float32: 0.03, torch.bfloat16: 0.06, torch.float16: 0.10, torch.float64: 0.03}


def settle(module: nn.Module, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with torch.no_grad():
        for norm in module.modules():
            if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):
                norm.running_mean.normal_()
                norm.running_var.uniform_(0.5, 2)
                norm.num_batches_tracked.fill_(7)
                if norm.affine:
                    norm.weight.uniform_(0.2, 2).mul_(torch.sign(torch.randn_like(norm.weight)))
                    norm.bias.normal_()
    return module.eval()


def conv_norm(bias: bool = True, affine: bool = True, channels: int = 8) -> torch.fx.GraphModule:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(4, channels, 3, bias=bias), nn.BatchNorm2d(channels, affine=affine))
    return torch.fx.symbolic_trace(settle(model))


def fold(gm: torch.fx.GraphModule, **settings: Any) -> torch.fx.GraphModule:
    refold.FuseBatchNorm2dInConv2d(**settings)(gm)
    assert refold.history(gm)
    return gm


def assert_bits(gm: nn.Module, before: nn.Module) -> None:
    mine, theirs = gm.state_dict(), before.state_dict()
    assert list(mine) == list(theirs)
    for name in theirs:
        assert same_bits(mine[name], theirs[name]), name


# --- operations ----------------------------------------------------------------------------------------------------

W = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
OPERATIONS: list[tuple[Operation, dict[str, torch.Tensor]]] = [
    (Concatenate((2, 4)), {"0": W[:2], "1": W[2:]}),
    (Concatenate((1, 3), 1), {"0": W[:, :1], "1": W[:, 1:]}),
    (ConcatenateBlocks((2, 4), 0, 2), {"0": W[:2], "1": W[2:]}),
    (AppendColumn(), {"weight": W, "bias": W[:, 0]}),
    (Slice((2, 4)), {"whole": W}),
    (Transpose(), {"weight": W}),
    (Permute((2, 0, 1)), {"weight": W.reshape(3, 2, 4)}),
    (Rename(), {"weight": W}),
    (Reshape((6, 4), (2, 12)), {"weight": W}),
    (Pad(3, 1), {"weight": W}),
    (Fill((2, 2), 1.5), {}),
    (Scale(0), {"weight": W, "scale": W[:, 1]}),
    (Scale(1, -1), {"weight": W, "scale": W[2]}),
    (AddLowRank(0.3), {"weight": W, "a": W[:2], "b": W[:, :2]}),
    (SumTaps((2,)), {"weight": W.reshape(4, 2, 3)}),
    (SumTaps((4, 1)), {"weight": W.reshape(2, 3, 2, 2)}),
    (SumTaps((2, 2)), {"weight": W[:5, :].reshape(1, 1, 5, 4)}),
    (FoldBatchNormInLayer(1e-5, 0), {"weight": W, "running_mean": W[:, 0], "running_var": W[:, 1].abs()}),
    (
        FoldBatchNormInLayer(1e-5, 1, "norm"),
        {"weight": W, "bias": W[:, 0], "running_mean": W[0], "running_var": W[1].abs()},
    ),
]


@pytest.mark.parametrize(
    ("operation", "old"), OPERATIONS, ids=lambda v: type(v).__name__ if isinstance(v, Operation) else ""
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_operation_gives_its_sources_back(
    operation: Operation, old: dict[str, torch.Tensor], dtype: torch.dtype
) -> None:
    old = {role: tensor.to(dtype) for role, tensor in old.items()}
    names = {role: f"layer.{role}" for role in old}
    targets = {role: f"new.{role}" for role in operation.forward(old)}
    new, record = apply_map(WeightMap(operation, names, targets), old)
    assert set(new) == set(targets)
    back = record.recover({role: tensor.clone() for role, tensor in new.items()})
    assert set(back) == set(old)
    for role, tensor in old.items():
        assert same_bits(back[role].contiguous(), tensor.contiguous()), role
    if operation.structural:
        assert record.nbytes == 0


@pytest.mark.parametrize(
    ("operation", "old"), OPERATIONS, ids=lambda v: type(v).__name__ if isinstance(v, Operation) else ""
)
def test_every_operation_is_plain_data(operation: Operation, old: dict[str, torch.Tensor]) -> None:
    data = json.loads(json.dumps(operation.settings()))
    assert Operation.from_settings(data) == operation
    text = str(WeightMap(operation, {"weight": "a.weight"}, {"weight": "b.weight"}))
    assert type(operation).__name__ in text and "a.weight" in text and "b.weight" in text


def test_unknown_operations_and_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown"):
        Operation.from_settings({"operation": "Popen"})
    with pytest.raises(ValueError, match="settings"):
        Operation.from_settings({"operation": "Concatenate", "shell": True})


# --- the correction ------------------------------------------------------------------------------------------------


SCALES: dict[str, Any] = {
    "usual": lambda n: torch.rand(n) + 0.5,
    "negative": lambda n: -(torch.rand(n) + 0.5),
    "tiny": lambda n: (torch.rand(n) + 0.5) * 2.0**-9,
    "large": lambda n: (torch.rand(n) + 0.5) * 2.0**9,
    "wide": lambda n: torch.exp(torch.randn(n)),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", SCALES)
def test_corrections_are_a_few_per_cent(name: str, dtype: torch.dtype) -> None:
    """Convolutions of ResNet-50's kinds with their usual initialisation."""
    torch.manual_seed(0)
    held = total = 0
    for shape in ((256, 64, 1, 1), (64, 64, 3, 3), (128, 256, 1, 1)):
        conv = nn.Conv2d(shape[1], shape[0], shape[2], bias=False)
        norm = nn.BatchNorm2d(shape[0])
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        norm.weight.data = SCALES[name](shape[0])
        norm.running_var.uniform_(0.1, 3)
        norm.running_mean.normal_()
        gm = torch.fx.symbolic_trace(nn.Sequential(conv, norm).eval().to(dtype))
        before = copy.deepcopy(gm)
        fold(gm)
        record = refold.history(gm)[0].maps[0]
        held += sum(correction.nbytes for correction in record.corrections.values())
        total += gm.get_parameter("0.weight").numel() * dtype.itemsize
        refold.undo(gm)
        assert_bits(gm, before)
    if (name, dtype) != ("tiny", torch.float16):  # folded numbers are subnormal there: bits are really lost
        assert held <= SHARE[dtype] * total, held / total


def test_a_power_of_two_scale_needs_no_correction() -> None:
    gm = conv_norm()
    norm = gm.get_submodule("1")
    norm.eps = 0.0
    norm.running_var.fill_(0.25)
    norm.weight.data = torch.tensor([1.0, -2.0, 0.5, 4.0, 8.0, -0.125, 1.0, 2.0])
    before = copy.deepcopy(gm)
    fold(gm)
    record = refold.history(gm)[0].maps[0]
    assert sum(correction.nbytes for correction in record.corrections.values()) == 0
    refold.undo(gm)
    assert_bits(gm, before)


@pytest.mark.parametrize("dtype", FLOATS)
def test_extreme_numbers_come_back(dtype: torch.dtype) -> None:
    gm = conv_norm().to(dtype)
    info = torch.finfo(dtype)
    odd = [0.0, -0.0, info.tiny, -info.tiny, info.smallest_normal / 2, info.max, -info.max, float("inf"), float("nan")]
    with torch.no_grad():
        gm.get_parameter("0.weight").view(-1)[: len(odd)] = torch.tensor(odd, dtype=torch.float64).to(dtype)
        gm.get_parameter("1.weight")[:4] = torch.tensor([0.0, info.tiny, 1e4, -1e-4], dtype=torch.float64).to(dtype)
    before = copy.deepcopy(gm)
    fold(gm)
    refold.undo(gm)
    assert_bits(gm, before)


def test_the_history_says_how_much_it_holds() -> None:
    gm = fold(conv_norm(channels=64))
    weights = gm.get_parameter("0.weight").numel() * 4
    vectors = 5 * 64 * 4 + 8
    assert vectors < refold.history(gm).nbytes < vectors + 0.04 * weights
    full = fold(conv_norm(channels=64), keep="original")
    assert refold.history(full).nbytes == vectors + weights


def test_structural_rewrites_hold_nothing() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x) * self.k(x)

    gm = torch.fx.symbolic_trace(Heads())
    refold.MergeLinears()(gm)
    refold.FuseBiasInLinear()(gm)
    assert len(refold.history(gm)) == 2 and refold.history(gm).nbytes == 0


# --- identity ------------------------------------------------------------------------------------------------------


def test_living_originals_come_back_themselves_and_changed_ones_are_left_alone() -> None:
    gm = conv_norm()
    weight, gamma = gm.get_parameter("0.weight"), gm.get_parameter("1.weight")
    fold(gm)
    with torch.no_grad():
        gamma.add_(1)
    theirs = gamma.detach().clone()
    refold.undo(gm)
    assert gm.get_parameter("0.weight") is weight
    assert gm.get_parameter("1.weight") is not gamma
    assert torch.equal(gamma, theirs) and not torch.equal(gm.get_parameter("1.weight"), gamma)


def test_originals_are_not_kept_alive() -> None:
    import weakref

    gm = conv_norm()
    watched = weakref.ref(gm.get_parameter("0.weight"))
    fold(gm)
    gc.collect()
    assert watched() is None


# --- training comes back -------------------------------------------------------------------------------------------


def write_in_place(gm: nn.Module) -> None:
    with torch.no_grad():
        gm.get_parameter("0.weight").add_(0.25)


def write_through_data(gm: nn.Module) -> None:
    gm.get_parameter("0.weight").data.view(-1)[3] = 9.0


def write_by_loading(gm: nn.Module) -> None:
    gm.load_state_dict({name: tensor * 1.5 for name, tensor in gm.state_dict().items()})


def write_by_training(gm: nn.Module) -> None:
    optimizer = torch.optim.SGD(gm.parameters(), lr=0.1)
    gm(torch.randn(2, 4, 6, 6, dtype=next(gm.parameters()).dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def write_a_new_parameter(gm: nn.Module) -> None:
    gm.get_submodule("0").weight = nn.Parameter(torch.randn_like(gm.get_parameter("0.weight")))


WRITES = [write_in_place, write_through_data, write_by_loading, write_by_training, write_a_new_parameter]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("keep", ["correction", "original"])
@pytest.mark.parametrize("bias", [True, False])
def test_whatever_changed_while_folded_comes_back(write: Any, keep: str, bias: bool) -> None:
    gm = fold(conv_norm(bias).double(), keep=keep)
    before = {name: tensor.clone() for name, tensor in gm.state_dict().items()}
    write(gm)
    after = {name: tensor.clone() for name, tensor in gm.state_dict().items()}
    assert any(not torch.equal(after[name], before[name]) for name in after)
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    folded = copy.deepcopy(gm)
    refold.undo(gm)
    assert len(list(gm.children())) == 2
    assert not list(deviations(gm, folded, (x,)))
    again = fold(copy.deepcopy(gm))
    assert again.state_dict().keys() == after.keys() and not list(deviations(gm, again, (x,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_were_not_trained_keep_their_bits(dtype: torch.dtype) -> None:
    """Only some numbers changed: all others come back bit for bit, and folding again gives what was trained."""
    gm = conv_norm(channels=32).to(dtype)
    before = gm.get_parameter("0.weight").detach().clone()
    fold(gm)
    with torch.no_grad():
        gm.get_parameter("0.weight")[5].mul_(1.5)
    trained = gm.get_parameter("0.weight").detach().clone()
    refold.undo(gm)
    now = gm.get_parameter("0.weight").detach()
    others = [i for i in range(32) if i != 5]
    assert same_bits(now[others], before[others]) and not torch.equal(now[5], before[5])
    fold(gm)
    assert same_bits(gm.get_parameter("0.weight")[others], trained[others])


def test_a_changed_bias_goes_into_beta_or_into_the_bias() -> None:
    for affine in (True, False):
        gm = fold(conv_norm(affine=affine).double())
        with torch.no_grad():
            gm.get_parameter("0.bias").add_(1)
        folded = copy.deepcopy(gm)
        refold.undo(gm)
        assert not list(deviations(gm, folded, (torch.ones(1, 4, 6, 6, dtype=torch.float64),)))


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 4)])
def test_a_changed_bias_of_a_fold_for_every_rank_goes_into_the_bias(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double().eval()
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    gm = torch.fx.symbolic_trace(model)
    refold.FuseBatchNorm1dInLinear()(gm)
    with torch.no_grad():
        gm.get_parameter("0.bias").add_(torch.randn(4))
    x = torch.randn(shape, dtype=torch.float64)
    trained = gm(x).detach()
    refold.undo(gm)
    assert torch.allclose(gm(x), trained, rtol=1e-10, atol=1e-12)


def test_a_bias_that_nothing_can_hold() -> None:
    gm = fold(conv_norm(bias=False, affine=False))
    assert not gm.get_parameter("0.bias").requires_grad, "it would be trained and could not return"
    untouched = copy.deepcopy(gm)
    with torch.no_grad():
        gm.get_parameter("0.bias").add_(1)
    code = gm.code
    with pytest.raises(WeightsChanged, match=r"0\.weight.*neither the layer nor its batch norm has a bias"):
        refold.undo(gm)
    assert gm.code == code and len(refold.history(gm)) == 1
    refold.undo(untouched)


def dead_channel() -> torch.fx.GraphModule:
    gm = conv_norm()
    with torch.no_grad():
        gm.get_parameter("1.weight")[3] = 0
    return gm


def test_a_dead_channel_comes_back_if_it_was_not_changed() -> None:
    gm = dead_channel()
    before = copy.deepcopy(gm)
    fold(gm)
    refold.undo(gm)
    assert_bits(gm, before)
    fold(gm)
    with torch.no_grad():
        gm.get_parameter("0.weight")[2].mul_(2)
        gm.get_parameter("0.bias").add_(1)
    refold.undo(gm)
    assert same_bits(gm.get_parameter("0.weight")[3], before.get_parameter("0.weight")[3])


@pytest.mark.parametrize("keep", ["correction", "original"])
def test_a_dead_channel_that_was_changed_is_refused_and_the_ways_out_work(keep: str) -> None:
    gm = dead_channel()
    before = copy.deepcopy(gm)
    alive = gm.get_parameter("0.weight")
    fold(gm, keep=keep)
    with torch.no_grad():
        gm.get_parameter("0.weight")[3] = 1
    with pytest.raises(WeightsChanged, match=r"0\.weight.*scale of 0.*weights='original'"):
        refold.undo(gm)
    refold.undo(gm, weights="original")
    assert_bits(gm, before)
    assert gm.get_parameter("0.weight") is alive


def test_the_original_is_refused_where_nobody_knows_it_any_more() -> None:
    gm = conv_norm()
    fold(gm)
    gc.collect()
    with torch.no_grad():
        gm.get_parameter("0.weight").add_(1)
    with pytest.raises(WeightsChanged, match="no longer known"):
        refold.undo(gm, weights="original")
    refold.undo(gm)


# --- casts and devices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "wide"), [(torch.bfloat16, torch.float32), (torch.float16, torch.float64), (torch.float32, torch.float64)]
)
def test_a_cast_to_a_wider_dtype_loses_nothing(start: torch.dtype, wide: torch.dtype) -> None:
    gm = conv_norm().to(start)
    before = copy.deepcopy(gm).to(wide)
    fold(gm).to(wide)
    refold.undo(gm)
    assert_bits(gm, before)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_a_cast_to_a_narrower_dtype(bias: bool, affine: bool, half: torch.dtype) -> None:
    gm = conv_norm(bias, affine)
    expected = copy.deepcopy(gm).to(half)
    fold(gm).to(half)
    refold.undo(gm)
    eps = torch.finfo(half).eps
    for name, tensor in expected.state_dict().items():
        found = gm.state_dict()[name]
        assert found.dtype == tensor.dtype
        if name == "0.weight":  # W' and s are rounded once each, and the quotient again: at most 2 ulps more
            assert bool(((found - tensor).abs().double() <= 2.5 * eps * tensor.abs().double() + eps**2).all())
        else:
            assert same_bits(found, tensor), name


def test_on_the_meta_device() -> None:
    gm = fold(conv_norm()).to("meta")
    refold.undo(gm)
    assert all(tensor.is_meta for tensor in gm.state_dict().values())
    assert gm.get_parameter("0.weight").shape == (8, 4, 3, 3)
    fold(gm)
    refold.undo(gm)
    assert list(gm.state_dict()) == list(conv_norm().state_dict())


# --- batch norms before linear layers ------------------------------------------------------------------------------


def norm_linear(bias: bool) -> torch.fx.GraphModule:
    torch.manual_seed(1)
    return torch.fx.symbolic_trace(settle(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3, bias=bias))).double())


@pytest.mark.parametrize("bias", [True, False])
def test_a_batch_norm_before_a_linear_layer(bias: bool) -> None:
    gm = norm_linear(bias)
    before = copy.deepcopy(gm)
    refold.FuseBatchNorm1dInLinear()(gm)
    assert refold.history(gm)
    refold.undo(gm)
    assert_bits(gm, before)


def test_training_a_layer_with_a_batch_norm_before_it() -> None:
    gm = norm_linear(True)
    refold.FuseBatchNorm1dInLinear()(gm)
    x = torch.randn(4, 5, dtype=torch.float64)
    with torch.no_grad():
        gm.get_parameter("1.weight").mul_(1.5)
        gm.get_parameter("1.bias").add_(0.5)
    folded = copy.deepcopy(gm)
    refold.undo(gm)
    assert not list(deviations(gm, folded, (x,)))
    gm = norm_linear(False)
    refold.FuseBatchNorm1dInLinear()(gm)
    with torch.no_grad():
        gm.get_parameter("1.weight").mul_(1.5)
    with pytest.raises(WeightsChanged, match="no bias of its own"):
        refold.undo(gm)


def test_two_batch_norms_behind_one_convolution() -> None:
    """Two maps in one change: the second reads what the first made."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.BatchNorm2d(8))
    gm = torch.fx.symbolic_trace(settle(model))
    before = copy.deepcopy(gm)
    fold(gm)
    assert len(refold.history(gm)[0].maps) == 2
    refold.undo(gm)
    assert_bits(gm, before)
    fold(gm.double())
    with torch.no_grad():
        gm.get_parameter("0.weight").mul_(1.25)
        gm.get_parameter("0.bias").add_(1)
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    folded = copy.deepcopy(gm)
    refold.undo(gm)
    assert not list(deviations(gm, folded, (x,)))
