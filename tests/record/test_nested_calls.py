"""A transformation that calls others inside its own `transform`: all of it is one change, or it is refused."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Tracer, symbolic_trace

import refold
from refold import FoldBatchNorm, MergeConvolutions, MergeLinears
from refold.errors import BrokenTransformation
from refold.testing import Portrait


class Net(nn.Module):
    """Two linears that merge, two convolutions that merge once their norms are folded, and a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()
        self.conv, self.norm = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)
        self.other, self.other_norm = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)
        for norm in (self.norm, self.other_norm):
            nn.init.uniform_(norm.running_var, 0.5, 2)
            nn.init.normal_(norm.running_mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.a(x)) * self.b(x)
        return self.norm(self.conv(y)) + self.other_norm(self.other(y))


class Calls(refold.Transformation):
    """Does what it is told."""

    preserves_computation = True

    def __init__(self, work: Callable[[GraphModule], Any]) -> None:
        self.work = work

    def __repr__(self) -> str:
        return "Calls()"

    def transform(self, graph_module: GraphModule) -> GraphModule:
        output = self.work(graph_module)
        return output if isinstance(output, GraphModule) else graph_module


def merge_and_edit(gm: GraphModule) -> None:
    MergeLinears()(gm)
    gm.relu = nn.Threshold(0, 0)


def fold_and_merge(gm: GraphModule) -> None:
    FoldBatchNorm()(gm)
    MergeConvolutions()(gm)


def all_composed(gm: GraphModule) -> None:
    refold.compose(FoldBatchNorm(), MergeConvolutions(), MergeLinears())(gm)


def calls_in_calls(gm: GraphModule) -> None:
    Calls(fold_and_merge)(gm)
    Calls(merge_and_edit)(gm)
    gm.delete_all_unused_submodules()


def tries_on_a_copy(gm: GraphModule) -> None:
    FoldBatchNorm()(copy.deepcopy(gm))
    MergeLinears()(gm)


GOOD = [MergeLinears(), merge_and_edit, fold_and_merge, all_composed, calls_in_calls, tries_on_a_copy]


def names(work: Any) -> str:
    return getattr(work, "__name__", repr(work))


@pytest.mark.parametrize("work", GOOD, ids=names)
def test_all_of_it_is_one_change(work: Callable[[GraphModule], Any]) -> None:
    torch.manual_seed(0)
    model, x = Net().double().eval(), torch.randn(2, 2, 3, 4, dtype=torch.float64)
    original = copy.deepcopy(model)
    gm = symbolic_trace(model)
    before = Portrait.of(gm)
    Calls(work)(gm)
    assert [change.name for change in refold.history(gm)] == ["Calls"] and refold.result(gm).rewritten
    assert refold.verify(gm, x).right and torch.allclose(gm(x), original(x))
    given = refold.original_state_dict(gm)
    assert list(given) == list(original.state_dict())
    assert all(torch.equal(given[key], value) for key, value in original.state_dict().items())
    assert before.differences(Portrait.of(refold.undo(copy.deepcopy(gm)))) == []
    refold.undo(gm, None)
    assert before.differences(Portrait.of(gm)) == [] and not refold.history(gm)


@pytest.mark.parametrize("work", [fold_and_merge, calls_in_calls], ids=names)
def test_weights_that_were_trained_or_loaded_come_back(work: Callable[[GraphModule], Any]) -> None:
    torch.manual_seed(0)
    gm, x = symbolic_trace(Net().double().eval()), torch.randn(2, 2, 3, 4, dtype=torch.float64)
    Calls(work)(gm)
    with torch.no_grad():
        for parameter in gm.parameters():
            parameter.add_(0.1)
    trained = gm(x)
    assert torch.allclose(refold.undo(copy.deepcopy(gm))(x), trained, rtol=1e-12)
    other = Net().double().eval()
    refold.load_original_state_dict(gm, other.state_dict())
    assert torch.allclose(gm(x), other(x), rtol=1e-12)
    refold.undo(gm)
    assert all(torch.equal(gm.state_dict()[key], value) for key, value in other.state_dict().items())


def test_it_stands_beside_other_changes_and_is_reversed_as_a_whole() -> None:
    class Reversible(Calls, refold.ReversibleTransformation):
        pass

    gm = symbolic_trace(Net().eval())
    before = Portrait.of(gm)
    t = Reversible(fold_and_merge)
    refold.compose(MergeLinears(), t)(gm)
    assert [change.name for change in refold.history(gm)] == ["MergeLinears", "Reversible"]
    t(gm, reverse=True)
    MergeLinears()(gm, reverse=True)
    assert before.differences(Portrait.of(gm)) == [] and not refold.history(gm)


def replaces_what_was_made(gm: GraphModule) -> None:
    MergeLinears()(gm)
    gm.a_b_merged.weight = nn.Parameter(gm.a_b_merged.weight.detach() * 2)


def replaces_between(gm: GraphModule) -> None:
    FoldBatchNorm()(gm)
    gm.conv.weight = nn.Parameter(gm.conv.weight.detach() * 2)
    MergeConvolutions()(gm)


def replaces_before(gm: GraphModule) -> None:
    gm.a.weight = nn.Parameter(gm.a.weight.detach() * 2)
    MergeLinears()(gm)


def adds_before(gm: GraphModule) -> None:
    gm.c = nn.Conv2d(2, 3, 1)
    next(n for n in gm.graph.nodes if n.target == "conv").target = "c"
    FoldBatchNorm()(gm)


def adds_before_and_lets_go(gm: GraphModule) -> None:
    adds_before(gm)
    gc.collect()  # nothing holds the weights that the fold read any more


def works_on_a_copy(gm: GraphModule) -> GraphModule:
    return refold.compose(MergeLinears(), inplace=False)(gm)


def returns_another(gm: GraphModule) -> GraphModule:
    MergeLinears()(gm)
    return GraphModule(gm, gm.graph)


BAD = [
    (replaces_what_was_made, r"Calls\(\) changed a_b_merged\.weight, which a transformation that it called had made"),
    (replaces_between, r"Calls\(\) changed conv\.weight"),
    (replaces_before, r"Calls\(\) put a\.weight in its place and then computed weights from it"),
    (adds_before, r"Calls\(\) put c\.weight in its place and then computed weights from it"),
    (adds_before_and_lets_go, r"Calls\(\) put c\.weight in its place and then computed weights from it"),
    (works_on_a_copy, "returned another module after it called other transformations"),
    (returns_another, "returned another module after it called other transformations"),
]


@pytest.mark.parametrize(("work", "sentence"), BAD, ids=[names(work) for work, _ in BAD])
def test_what_one_change_cannot_hold_is_refused(work: Callable[[GraphModule], Any], sentence: str) -> None:
    gm = symbolic_trace(Net().eval())
    before, held = Portrait.of(gm), [*gm.parameters()]
    with pytest.raises(BrokenTransformation, match=sentence):
        Calls(work)(gm)
    assert before.differences(Portrait.of(gm), same_objects=True) == [] and held and not refold.history(gm)


def test_writing_into_what_was_made_is_refused_and_told() -> None:
    def work(gm: GraphModule) -> None:
        MergeLinears()(gm)
        with torch.no_grad():
            gm.a_b_merged.weight.mul_(2)  # the memory of a.weight and b.weight, too

    with pytest.raises(BrokenTransformation, match=r"Calls\(\) changed a_b_merged\.weight") as error:
        Calls(work)(symbolic_trace(Net().eval()))
    assert "had written into a_b_merged.weight in place" in "".join(error.value.__notes__)


@pytest.mark.parametrize("undo", [lambda gm: MergeLinears()(gm, reverse=True), refold.undo], ids=["reverse", "undo"])
def test_undoing_inside_is_refused(undo: Callable[[GraphModule], Any]) -> None:
    gm = symbolic_trace(Net().eval())
    original = Portrait.of(gm)
    MergeLinears()(gm)
    merged, past = Portrait.of(gm), refold.history(gm)
    with pytest.raises(BrokenTransformation, match=r"Calls\(\) undoes changes of the module that it is transforming"):
        Calls(undo)(gm)
    assert merged.differences(Portrait.of(gm)) == [] and refold.history(gm) is past
    assert original.differences(Portrait.of(refold.undo(gm))) == []


def test_a_graph_inside_the_graph_is_refused() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = symbolic_trace(Net().eval())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + 1

    class InnerIsLeaf(Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return True

    outer, x = Outer().eval(), torch.randn(2, 2, 3, 4)
    gm = GraphModule(outer, InnerIsLeaf().trace(outer))
    expected = gm(x)
    with pytest.raises(BrokenTransformation, match=r"calls MergeLinears\(\) on a module inside"):
        Calls(lambda gm: MergeLinears()(gm.inner))(gm)
    assert torch.equal(gm(x), expected) and not refold.history(gm)
