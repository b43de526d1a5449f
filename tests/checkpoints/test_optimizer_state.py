"""An optimizer goes on as if nothing had happened: moments, steps and groups move through the weight maps."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import refold
from refold.checkpoints.optimizer_state import carry_optimizer
from refold.errors import OptimizerMismatch
from refold.testing.equivalence import deviations

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
}


class Heads(nn.Module):
    """Three linear layers on one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(5, n) for n in (4, 4, 3))
        self.out = nn.Linear(11, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(torch.cat([self.q(x), self.k(x), self.v(x)], -1)))

    def forward_without_tanh(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.q(x), self.k(x), self.v(x)], -1))


class Normed(nn.Module):
    """A convolution with a batch norm behind it."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=bias)
        self.bn = nn.BatchNorm2d(4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.bn(self.conv(x))).mean((2, 3)))

    def forward_without_tanh(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.bn(self.conv(x)).mean((2, 3)))


def heads() -> torch.fx.GraphModule:
    torch.manual_seed(0)
    return torch.fx.symbolic_trace(Heads().double())


def normed(bias: bool = True) -> torch.fx.GraphModule:
    torch.manual_seed(0)
    model = Normed(bias).double().eval()
    with torch.no_grad():
        model.bn.running_mean.normal_()
        model.bn.running_var.uniform_(0.5, 2)
        model.bn.weight.uniform_(-2, 2)
        model.bn.bias.normal_()
    return torch.fx.symbolic_trace(model)


def train(gm: torch.fx.GraphModule, optimizer: torch.optim.Optimizer, steps: range, shape: tuple[int, ...]) -> None:
    for step in steps:
        x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        gm(x).square().sum().backward()
        optimizer.step()


def set_gradients(gm: torch.fx.GraphModule, step: int) -> None:
    """Gradients that do not depend on how the layers are cut, so that bits can be compared."""
    whole = torch.randn(11, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    start = 0
    named = dict(gm.named_parameters())
    merged = [n for n in named if "merged" in n]
    if merged:
        for name in merged:
            named[name].grad = (whole[:, :5] if name.endswith("weight") else whole[:, 5]).clone()
    else:
        for name, rows in (("q", 4), ("k", 4), ("v", 3)):
            part = whole[start : start + rows]
            named[f"{name}.weight"].grad, named[f"{name}.bias"].grad = part[:, :5].clone(), part[:, 5].clone()
            start += rows
    named["out.weight"].grad, named["out.bias"].grad = torch.ones(2, 11).double(), torch.ones(2).double()


def states(gm: torch.fx.GraphModule, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in gm.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}:{key}"] = value
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_merge_and_split_half_way_changes_no_bit(kind: str) -> None:
    plain, folded = heads(), heads()
    ours, theirs = (OPTIMIZERS[kind](list(gm.parameters())) for gm in (folded, plain))
    for step in range(9):
        if step == 3:
            with carry_optimizer(ours, folded):
                refold.MergeLinears()(folded)
            assert any("merged" in n for n, _ in folded.named_parameters())
            assert len(ours.param_groups[0]["params"]) == 4
        if step == 6:
            with carry_optimizer(ours, folded):
                refold.undo(folded)
        for gm, optimizer in ((plain, theirs), (folded, ours)):
            set_gradients(gm, step)
            optimizer.step()
    for (name, a), (other, b) in zip(plain.named_parameters(), folded.named_parameters(), strict=True):
        assert name == other and torch.equal(a, b), name
    expected, found = states(plain, theirs), states(folded, ours)
    assert expected.keys() == found.keys()
    assert all(torch.equal(torch.as_tensor(expected[k]), torch.as_tensor(found[k])) for k in expected)
    assert [id(p) for p in ours.param_groups[0]["params"]] == [id(p) for p in folded.parameters()]


def whole_numbers() -> torch.fx.GraphModule:
    """Linear layers with small whole numbers: sums are exact in any order, so that even real training can be compared
    bit for bit although one wide matrix product takes the place of three."""
    gm = heads()
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in gm.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=numbers))
    return gm


def train_exactly(gm: torch.fx.GraphModule, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randint(-2, 3, (6, 5), generator=torch.Generator().manual_seed(step)).double()
        optimizer.zero_grad()
        gm(x).sum().backward()
        optimizer.step()


def test_real_training_with_a_merge_half_way_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Heads, "forward", Heads.forward_without_tanh)
    plain, folded = whole_numbers(), whole_numbers()
    ours, theirs = (torch.optim.SGD(gm.parameters(), lr=2**-3, momentum=0.5) for gm in (folded, plain))
    start = [p.detach().clone() for p in plain.parameters()]
    train_exactly(plain, theirs, range(6))
    train_exactly(folded, ours, range(2))
    with carry_optimizer(ours, folded):
        refold.compose(refold.MergeLinears(), refold.FuseBiasInLinear())(folded)
    assert len(refold.history(folded)) == 2
    train_exactly(folded, ours, range(2, 4))
    with carry_optimizer(ours, folded):
        refold.undo(folded, None)
    train_exactly(folded, ours, range(4, 6))
    for before, a, b in zip(start, plain.parameters(), folded.parameters(), strict=True):
        assert torch.equal(a, b) and not torch.equal(a, before)


@pytest.mark.parametrize("kind", ["adam", "adamw-amsgrad", "sgd-momentum", "rmsprop", "adagrad", "nadam"])
@pytest.mark.parametrize("bias", [True, False])
def test_folding_and_unfolding_a_batch_norm_between_steps(kind: str, bias: bool) -> None:
    plain, folded = normed(bias), normed(bias)
    ours, theirs = (OPTIMIZERS[kind](list(gm.parameters())) for gm in (folded, plain))
    train(plain, theirs, range(3), (4, 3, 6, 6))
    train(folded, ours, range(3), (4, 3, 6, 6))
    fold_and_unfold(folded, ours)
    expected, found = states(plain, theirs), states(folded, ours)
    assert expected.keys() == found.keys() and expected
    for key, value in expected.items():
        # divided by s^p and multiplied by the same number: two roundings of eps/2 each, in float64
        error = (torch.as_tensor(value) - torch.as_tensor(found[key])).abs()
        assert bool((error <= 2 * torch.finfo(torch.float64).eps * torch.as_tensor(value).abs()).all()), key
    for a, b in zip(plain.parameters(), folded.parameters(), strict=True):
        assert torch.equal(a, b)


def fold_and_unfold(gm: torch.fx.GraphModule, optimizer: torch.optim.Optimizer) -> None:
    with carry_optimizer(optimizer, gm):
        refold.FuseBatchNorm2dInConv2d()(gm)
    assert not any(n.startswith("bn") for n, _ in gm.named_parameters())
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in gm.parameters()}
    with carry_optimizer(optimizer, gm):
        refold.undo(gm)


@pytest.mark.parametrize("kind", ["adam", "adamw-amsgrad", "sgd-momentum", "rmsprop", "adagrad", "adadelta"])
def test_training_goes_on_bit_for_bit_after_a_fold_by_powers_of_two(kind: str) -> None:
    plain, folded = normed(), normed()
    for gm in (plain, folded):
        gm.bn.eps = 0.0
        with torch.no_grad():
            gm.bn.running_var.fill_(0.25)
            gm.bn.weight.copy_(torch.tensor([1.0, -2.0, 0.5, 4.0]))
            gm.bn.weight.requires_grad_(False)  # else the first step makes it something else than a power of two
    ours, theirs = (OPTIMIZERS[kind]([p for p in gm.parameters() if p.requires_grad]) for gm in (folded, plain))
    for first in (0, 2, 4):
        steps = range(first, first + 2)
        train(plain, theirs, steps, (4, 3, 6, 6))
        train(folded, ours, steps, (4, 3, 6, 6))
        fold_and_unfold(folded, ours)
    for (name, a), (_, b) in zip(plain.named_parameters(), folded.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def exact_numbers(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Small whole numbers, and batch norms whose scale is a power of two: every sum and product is exact in float64, in
    any order, so gradients can be compared bit for bit."""
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in (*gm.parameters(), *(b for b in gm.buffers() if b.is_floating_point())):
            tensor.copy_(torch.randint(-3, 4, tensor.shape, generator=numbers))
        for module in gm.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.eps = 2.0**-10
                powers = torch.randint(-1, 2, module.weight.shape, generator=numbers).double()
                module.running_var.copy_(4.0**powers - module.eps)
                module.weight.copy_(2.0 ** powers.flip(0))
    return gm


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(2)).double()


def test_gradients_move_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Normed, "forward", Normed.forward_without_tanh)
    gm = exact_numbers(normed())
    reference = copy.deepcopy(gm)
    x = whole(4, 3, 6, 6)
    for module in (gm, reference):
        module(x).square().sum().backward()
    wanted = {n: p.grad.clone() for n, p in reference.named_parameters() if p.grad is not None}
    refold.FuseBatchNorm2dInConv2d()(gm)
    folded = copy.deepcopy(gm)
    folded.zero_grad()
    folded(x).square().sum().backward()
    for (name, a), (_, b) in zip(gm.named_parameters(), folded.named_parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.equal(a.grad, b.grad) and b.grad.any(), name
    refold.undo(folded)
    for name, parameter in folded.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, wanted[name]), name


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_through_a_batch_norm_before_a_linear_layer(bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3, bias=bias)).double().eval()
    gm = exact_numbers(torch.fx.symbolic_trace(model))
    reference = copy.deepcopy(gm)
    x = whole(4, 5)
    reference(x).square().sum().backward()
    refold.FuseBatchNorm1dInLinear()(gm)
    assert refold.history(gm)
    gm(x).square().sum().backward()
    refold.undo(gm)
    wanted = dict(reference.named_parameters())
    for name, parameter in gm.named_parameters():
        assert parameter.grad is not None, name
        assert torch.equal(parameter.grad, wanted[name].grad) and parameter.grad.any(), name


def test_groups_with_different_settings_are_refused_and_nothing_changes() -> None:
    gm = heads()
    named = dict(gm.named_parameters())
    slow = [named["q.weight"]]
    rest = [p for n, p in named.items() if n != "q.weight"]
    optimizer = torch.optim.AdamW([{"params": slow, "lr": 1e-4}, {"params": rest}], lr=1e-2)
    train(gm, optimizer, range(2), (6, 5))
    code, before = gm.code, {n: p.detach().clone() for n, p in gm.named_parameters()}
    groups = [list(group["params"]) for group in optimizer.param_groups]
    with pytest.raises(OptimizerMismatch, match="groups differ in lr"), carry_optimizer(optimizer, gm):
        refold.MergeLinears()(gm)
    assert gm.code == code and not refold.history(gm)
    assert all(
        a is b
        for old, group in zip(groups, optimizer.param_groups, strict=True)
        for a, b in zip(old, group["params"], strict=True)
    )
    assert all(torch.equal(p, before[n]) for n, p in gm.named_parameters())
    train(gm, optimizer, range(2, 4), (6, 5))


def test_different_step_counts_are_refused() -> None:
    gm = heads()
    optimizer = torch.optim.Adam(gm.parameters())
    train(gm, optimizer, range(1), (6, 5))
    parameter = dict(gm.named_parameters())["k.weight"]
    optimizer.state[parameter]["step"] += 1
    with pytest.raises(OptimizerMismatch, match="'step' differs"), carry_optimizer(optimizer, gm):
        refold.MergeLinears()(gm)


def test_unequal_groups_with_equal_settings_are_joined_and_hyperparameters_are_kept() -> None:
    gm = heads()
    parameters = list(gm.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.02, betas=(0.8, 0.9))
    train(gm, optimizer, range(2), (6, 5))
    with carry_optimizer(optimizer, gm):
        refold.MergeLinears()(gm)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4
    assert all(group["betas"] == (0.8, 0.9) and group["lr"] == 0.02 for group in optimizer.param_groups)
    train(gm, optimizer, range(2, 4), (6, 5))


def test_a_transformation_that_works_on_a_copy() -> None:
    gm = heads()
    optimizer = torch.optim.Adam(gm.parameters())
    train(gm, optimizer, range(2), (6, 5))
    with carry_optimizer(optimizer, gm) as carry:
        other = refold.compose(refold.MergeLinears(), inplace=False)(gm)
        carry.to(other)
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in other.parameters()}
    train(other, optimizer, range(2, 4), (6, 5))


def test_second_moments_that_cannot_be_known_are_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)).eval()
    nn.init.normal_(model[0].bias)
    gm = torch.fx.symbolic_trace(model)
    optimizer = torch.optim.Adam(gm.parameters())
    gm(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    with pytest.raises(OptimizerMismatch, match="exp_avg_sq"), carry_optimizer(optimizer, gm):
        refold.FuseBatchNorm1dInLinear()(gm)
    assert not refold.history(gm)


def test_an_exception_inside_puts_everything_back() -> None:
    gm = heads()
    optimizer = torch.optim.Adam(gm.parameters())
    train(gm, optimizer, range(1), (6, 5))
    code = gm.code
    with pytest.raises(KeyboardInterrupt), carry_optimizer(optimizer, gm):
        refold.MergeLinears()(gm)
        raise KeyboardInterrupt
    assert gm.code == code
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in gm.parameters()]


def test_weights_trained_while_a_batch_norm_is_folded_come_back_with_their_moments() -> None:
    gm = normed()
    optimizer = torch.optim.SGD(gm.parameters(), lr=0.01, momentum=0.9)
    train(gm, optimizer, range(2), (4, 3, 6, 6))
    with carry_optimizer(optimizer, gm):
        refold.FuseBatchNorm2dInConv2d()(gm)
    train(gm, optimizer, range(2, 4), (4, 3, 6, 6))
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    folded, folded_momentum = copy.deepcopy(gm), optimizer.state[gm.conv.weight]["momentum_buffer"].clone()
    with carry_optimizer(optimizer, gm):
        refold.undo(gm)
    assert not list(deviations(gm, folded, (x,)))
    scale = (gm.bn.weight / torch.sqrt(gm.bn.running_var + gm.bn.eps)).detach().reshape(-1, 1, 1, 1)
    assert torch.equal(optimizer.state[gm.conv.weight]["momentum_buffer"], folded_momentum * scale)
    train(gm, optimizer, range(4, 6), (4, 3, 6, 6))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.Adafactor(p, lr=0.01), "'row_var' of Adafactor does not have the shape"),
        (
            lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.01),
            "Muon computes with each matrix as a whole",
        ),
    ],
)
@pytest.mark.parametrize("begin_folded", [False, True])
def test_state_that_is_not_kept_for_each_number_is_refused(make: Make, reason: str, begin_folded: bool) -> None:
    gm = heads()
    if begin_folded:
        refold.MergeLinears()(gm)
    optimizer = make(list(gm.parameters()))
    train(gm, optimizer, range(2), (6, 5))
    code, state = gm.code, copy.deepcopy(optimizer.state_dict())
    with pytest.raises(OptimizerMismatch, match=reason), carry_optimizer(optimizer, gm):
        refold.undo(gm) if begin_folded else refold.MergeLinears()(gm)
    assert gm.code == code and bool(refold.history(gm)) == begin_folded
    train(gm, optimizer, range(2, 4), (6, 5))
    assert optimizer.state_dict()["state"].keys() == state["state"].keys()


def test_an_optimizer_of_one_long_vector_is_refused() -> None:
    gm = heads()
    optimizer = torch.optim.LBFGS(gm.parameters())
    with pytest.raises(OptimizerMismatch, match="LBFGS treats all parameters"), carry_optimizer(optimizer, gm):
        refold.MergeLinears()(gm)
    assert not refold.history(gm)
    with carry_optimizer(optimizer, gm):
        refold.ChangeTrueDivToMulByInverse()(gm)  # what moves no parameter is no concern of it
