"""What a reverse means: it takes back all that its transformation did, and changes nothing where that is nothing."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node, symbolic_trace

import refold
from refold import ChangeTrueDivToMulByInverse, FuseBiasInLinear, MergeLinears, ReversibleTransformation, compose
from refold.errors import NothingToUndo, ReverseMismatch
from refold.examples.attention_layers import Attention
from refold.testing import Portrait


class Divides(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 4


class Multiplies(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3 + x * 5


class Doubles(ReversibleTransformation):
    """Doubles constants of multiplications, and halves them to go back: 3 becomes 6, and then 3.0."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.nodes:
            if node.target is operator.mul and not self.transformed(node):
                node.args = (node.args[0], node.args[1] * 2)
                self.mark_as_transformed(node)
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        for node in self.get_transformed_nodes(graph_module):
            node.args = (node.args[0], node.args[1] / 2)
            self.mark_as_restored(node)
        return graph_module


class Marks(ReversibleTransformation):
    """Edits nothing: it marks nodes with a target, and takes its marks off."""

    def __init__(self, target: str) -> None:
        self.target = target

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.nodes:
            if self.target in str(node.target):
                self.mark_as_transformed(node)
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        for node in self.get_transformed_nodes(graph_module):
            self.mark_as_restored(node)
        return graph_module


class Appends(ReversibleTransformation):
    """Appends a negation to the output at every call, so that it can be applied again and again."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        output = graph_module.graph.output_node()
        value = output.args[0]
        assert isinstance(value, Node)
        with graph_module.graph.inserting_before(output):
            output.args = (graph_module.graph.call_function(torch.neg, (value,)),)
        return graph_module


def unchanged(gm: GraphModule, t: ReversibleTransformation) -> None:
    """A reverse changes nothing, and says so."""
    before = Portrait.of(gm)
    assert t(gm, reverse=True) is gm
    assert before.differences(Portrait.of(gm), same_objects=True) == []
    assert not refold.result(gm).rewritten and "nothing" in refold.result(gm).note.lower()


@pytest.mark.parametrize("t", [MergeLinears(), Doubles(), Marks("mul"), compose(MergeLinears(), FuseBiasInLinear())])
def test_what_was_never_applied_is_not_reversed(t: ReversibleTransformation) -> None:
    unchanged(symbolic_trace(Divides()), t)


@pytest.mark.parametrize("t", [ChangeTrueDivToMulByInverse(), compose(ChangeTrueDivToMulByInverse(), MergeLinears())])
def test_what_was_reversed_already_stays(t: ReversibleTransformation) -> None:
    gm = symbolic_trace(Divides())
    t(gm)
    assert refold.history(gm)
    t(gm, reverse=True)
    assert not refold.history(gm)
    unchanged(gm, t)


def test_what_matched_nothing_is_not_reversed() -> None:
    gm = symbolic_trace(Divides())
    unchanged(MergeLinears()(gm), MergeLinears())


def test_a_loop_that_does_not_know_what_matched() -> None:
    steps = [MergeLinears(), FuseBiasInLinear(), ChangeTrueDivToMulByInverse(), Doubles(), Marks("add")]
    for model in (Divides(), Multiplies(), Attention()):
        gm = symbolic_trace(model)
        before = Portrait.of(gm)
        for t in steps:
            gm = t(gm)
        for t in reversed(steps):
            gm = t(gm, reverse=True)
        assert before.differences(Portrait.of(gm), same_objects=True) == []
        assert not refold.history(gm)


def test_parts_of_a_composition_that_matched_are_undone() -> None:
    together = compose(MergeLinears(), ChangeTrueDivToMulByInverse(), FuseBiasInLinear())
    gm = symbolic_trace(Divides())
    before = Portrait.of(gm)
    together(gm)
    assert len(refold.history(gm)) == 1
    together(gm, reverse=True)
    assert before.differences(Portrait.of(gm), same_objects=True) == []


def test_a_composition_out_of_place_gives_a_copy_even_of_nothing() -> None:
    gm = symbolic_trace(Divides())
    apart = compose(MergeLinears(), inplace=False)
    assert apart(gm, reverse=True) is not gm


def test_a_reverse_takes_back_every_change_of_its_own() -> None:
    gm = symbolic_trace(Divides())
    before, t = Portrait.of(gm), Appends()
    for _ in range(3):
        t(gm)
    assert len(refold.history(gm)) == 3
    assert refold.undo(copy.deepcopy(gm)).code != gm.code
    t(gm, reverse=True)
    assert before.differences(Portrait.of(gm), same_objects=True) == []
    with pytest.raises(NothingToUndo):
        refold.undo(gm)


def test_a_composition_takes_back_every_call_of_its_own() -> None:
    gm = symbolic_trace(Divides())
    before, t = Portrait.of(gm), compose(Appends(), ChangeTrueDivToMulByInverse())
    t(gm)
    t(gm)
    t(gm, reverse=True)
    assert before.differences(Portrait.of(gm), same_objects=True) == []


def test_others_changes_stay() -> None:
    gm = symbolic_trace(Attention())
    MergeLinears()(gm)
    ChangeTrueDivToMulByInverse()(gm)
    MergeLinears()(gm, reverse=True)
    assert [change.name for change in refold.history(gm)] == ["ChangeTrueDivToMulByInverse"]


def test_marks_whose_record_is_gone_are_an_error() -> None:
    gm = symbolic_trace(Divides())
    ChangeTrueDivToMulByInverse()(gm)
    refold.commit(gm)
    with pytest.raises(NothingToUndo, match="record"):
        ChangeTrueDivToMulByInverse()(gm, reverse=True)
    gm = symbolic_trace(Divides())
    ChangeTrueDivToMulByInverse()(gm)
    with pytest.raises(NothingToUndo):
        ChangeTrueDivToMulByInverse()(GraphModule(gm, gm.graph), reverse=True)


def test_a_number_that_is_computed_back_is_no_mismatch() -> None:
    gm = symbolic_trace(Multiplies())
    before = Portrait.of(gm)
    Doubles()(gm)
    assert "6" in gm.code and "10" in gm.code
    Doubles()(gm, reverse=True)
    assert before.differences(Portrait.of(gm), same_objects=True) == []
    assert all(type(node.args[1]) is int for node in gm.graph.nodes if node.target is operator.mul)


def test_a_number_that_is_another_is_a_mismatch() -> None:
    class Wrong(Doubles):
        def reverse(self, graph_module: GraphModule) -> GraphModule:
            for node in self.get_transformed_nodes(graph_module):
                node.args = (node.args[0], node.args[1] / 2 + 1)
            return graph_module

    gm = symbolic_trace(Multiplies())
    Wrong()(gm)
    with pytest.raises(ReverseMismatch):
        Wrong()(gm, reverse=True)


def test_a_reverse_of_ones_own_runs_after_a_commit_too() -> None:
    gm = symbolic_trace(Multiplies())
    Doubles()(gm)
    refold.commit(gm)
    Doubles()(gm, reverse=True)
    assert [node.args[1] for node in gm.graph.nodes if node.target is operator.mul] == [3, 5]
    assert Doubles().get_transformed_nodes(gm) == []


def test_marks_alone_come_off_each_by_its_own_settings() -> None:
    gm = symbolic_trace(Multiplies())
    products, sums = Marks("mul"), Marks("add")
    products(gm)
    sums(gm)
    assert (len(products.get_transformed_nodes(gm)), len(sums.get_transformed_nodes(gm))) == (2, 1)
    products(gm, reverse=True)
    assert (len(products.get_transformed_nodes(gm)), len(sums.get_transformed_nodes(gm))) == (0, 1)
    sums(gm, reverse=True)
    assert sums.get_transformed_nodes(gm) == []
    unchanged(gm, products)


def test_marks_of_parts_come_off_with_the_composition() -> None:
    gm = symbolic_trace(Multiplies())
    together = compose(Marks("mul"), Doubles(), Marks("add"))
    together(gm)
    together(gm, reverse=True)
    assert all(t.get_transformed_nodes(gm) == [] for t in (Marks("mul"), Doubles(), Marks("add")))


def test_marked_nodes_say_by_whom() -> None:
    gm = symbolic_trace(Multiplies())
    t, other = Marks("mul"), Doubles()
    t(gm)
    other(gm)
    marked = [node for node in gm.graph.nodes if node.target is operator.mul]
    assert [node.transformations for node in marked] == [{t.signature, other.signature}] * 2
    other(gm, reverse=True)
    assert [node.transformations for node in marked] == [{t.signature}] * 2
