"""Weights that a change leaves in the model, in another layer or under another name, come back as they are by then."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, symbolic_trace

import refold
from refold import ChannelsLast, FoldBatchNorm, FoldPadding, FuseBatchNorm2dInConv2d, FuseBiasInLinear, MergeLora
from refold.errors import OutOfOrder
from refold.record.reversal import undo_chosen
from refold.rewrite.transformation import Transformation


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(F.pad(x, (1, 1, 1, 1))))


class Plain(Padded):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.down = nn.Linear(4, 2, bias=False)
        self.up = nn.Linear(2, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


IMAGE, ROWS = torch.randn(2, 3, 5, 5, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)
PAIRS = [
    pytest.param(Padded, [FoldPadding(), FuseBatchNorm2dInConv2d()], IMAGE, id="padding and norm"),
    pytest.param(Padded, [FoldPadding(), FoldBatchNorm()], IMAGE, id="padding and any norm"),
    pytest.param(Padded, [FoldPadding(), ChannelsLast()], IMAGE, id="padding and layout"),
    pytest.param(Plain, [ChannelsLast(), FoldBatchNorm()], IMAGE, id="layout and norm"),
    pytest.param(Adapted, [MergeLora(), FuseBiasInLinear()], ROWS, id="adapter and bias"),
]


def rewritten(model: type[nn.Module], steps: list[Transformation]) -> GraphModule:
    gm = symbolic_trace(model().double().eval())
    for step in steps:
        step(gm)
    assert len(refold.history(gm)) == len(steps)
    return gm


def train(gm: nn.Module) -> None:
    with torch.no_grad():
        for weight in gm.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize(("model", "steps", "x"), PAIRS)
def test_trained_weights_survive_the_undoing_of_two_rewrites_of_one_layer(model, steps, x, copied) -> None:
    gm = rewritten(model, steps)
    if copied:
        gm = copy.deepcopy(gm)
    train(gm)
    trained = gm(x).detach()
    refold.undo(gm, None)
    assert torch.allclose(gm(x), trained, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("model", "steps", "x"), PAIRS)
def test_a_loaded_checkpoint_survives_the_undoing_of_two_rewrites_of_one_layer(model, steps, x) -> None:
    gm, checkpoint = rewritten(model, steps), model().double().state_dict()
    refold.load_original_state_dict(gm, checkpoint)
    refold.undo(gm, None)
    assert all(torch.equal(tensor, checkpoint[name]) for name, tensor in gm.state_dict().items())


@pytest.mark.parametrize(("model", "steps", "x"), PAIRS)
def test_a_cast_survives_the_undoing_of_two_rewrites_of_one_layer(model, steps, x) -> None:
    gm = rewritten(model, steps).float()
    refold.undo(gm, None)
    assert {weight.dtype for weight in gm.parameters()} == {torch.float32}


def test_a_weight_that_a_later_rewrite_folds_is_not_held_by_an_earlier_one() -> None:
    gm = symbolic_trace(Padded().eval())
    weight = weakref.ref(gm.conv.weight)
    FoldPadding()(gm)
    FuseBatchNorm2dInConv2d()(gm)
    gc.collect()
    assert weight() is None


class Wrap(Transformation):
    """Puts a layer one level deeper, under another name."""

    def transform(self, gm: GraphModule) -> GraphModule:
        gm.add_module("box", nn.Sequential(gm.base))
        for node in gm.graph.nodes:
            if node.target == "base":
                node.target = "box.0"
        del gm.base
        return gm


def test_a_module_that_only_moved_comes_back_itself_with_what_was_trained_and_loaded() -> None:
    gm = symbolic_trace(Adapted().double())
    base, before = gm.base, copy.deepcopy(gm)
    Wrap()(gm)
    train(gm)
    trained = gm(ROWS).detach()
    assert torch.equal(refold.original_state_dict(gm)["base.weight"], base.weight)
    refold.undo(gm)
    assert gm.base is base and list(gm.state_dict()) == list(before.state_dict())
    assert torch.equal(gm(ROWS), trained)
    Wrap()(gm)
    refold.load_original_state_dict(gm, before.state_dict())
    assert torch.equal(gm(ROWS), before(ROWS))


def test_a_moved_layer_that_was_folded_before_loads_checkpoints_of_the_original() -> None:
    gm = symbolic_trace(Adapted().double())
    MergeLora()(gm)
    Wrap()(gm)
    other = Adapted().double()
    refold.load_original_state_dict(gm, other.state_dict())
    assert torch.allclose(gm(ROWS), other(ROWS), rtol=1e-10, atol=1e-12)
    refold.undo(gm, None)
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in gm.state_dict().items())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)


class DropSecond(Transformation):
    def transform(self, gm: GraphModule) -> GraphModule:
        for node in [n for n in gm.graph.nodes if n.target == "second"]:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        del gm.second
        return gm


class Replace(Transformation):
    def transform(self, gm: GraphModule) -> GraphModule:
        gm.first = nn.Linear(4, 4)
        return gm


def test_a_tie_comes_back_as_a_tie_and_only_when_its_other_end_is_there() -> None:
    gm = symbolic_trace(Tied())
    DropSecond()(gm)
    with torch.no_grad():
        gm.first.weight = nn.Parameter(torch.ones(4, 4))
    refold.undo(gm)
    assert gm.second.weight is gm.first.weight
    DropSecond()(gm)
    Replace()(gm)
    with pytest.raises(OutOfOrder):
        undo_chosen(gm, [0])
