"""What a transformation would do and why not, without a trace on the module."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

import refold
from refold.examples import attention_layers
from refold.graph.view import GraphView
from refold.record.copies import shared_copy
from refold.rewrite.editor import Editor
from refold.rewrite.rule import Rewrite, Site, Skip
from refold.testing import Portrait

ALL = [
    refold.MergeLinears(),
    refold.FuseBiasInLinear(),
    refold.ChangeTrueDivToMulByInverse(),
    refold.compose(refold.MergeLinears(), refold.ChangeTrueDivToMulByInverse()),
    refold.compose(refold.MergeLinears(), inplace=False),
]


def attention() -> GraphModule:
    return symbolic_trace(attention_layers.attention()[0].eval())


@pytest.mark.parametrize("t", ALL, ids=repr)
def test_it_says_what_the_call_then_does(t: refold.Transformation) -> None:
    gm = attention()
    before, held = Portrait.of(gm), [*gm.parameters()]
    storages = [p.untyped_storage().data_ptr() for p in held]
    said = refold.explain(gm, t)
    assert said and before.differences(Portrait.of(gm), same_objects=True) == []
    assert [p.untyped_storage().data_ptr() for p in held] == storages and not refold.history(gm)
    assert "No transformation was called" in refold.result(gm).note
    done = refold.result(t(gm))
    assert [r.what for r in said.rewritten] == [r.what for r in done.rewritten]


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.a.register_forward_hook(lambda *_: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x) / 0


def test_refusals_have_reasons() -> None:
    gm = symbolic_trace(Hooked())
    linears = refold.explain(gm, refold.MergeLinears())
    assert not linears and any("hook" in r.reason and r.node == "a" for r in linears.refused)
    division = refold.explain(gm, refold.ChangeTrueDivToMulByInverse())
    assert not division and [r.reason for r in division.refused] == ["it divides by 0"]


def test_no_match_is_said() -> None:
    said = refold.explain(symbolic_trace(nn.ReLU()), refold.MergeLinears())
    assert not said and said.note == "Nothing in the graph matched."


class Trains(refold.Transformation):
    """Somebody else's, which changes all it can."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph_module.train()
        for parameter in graph_module.parameters():
            parameter.requires_grad_(False)
        graph_module.value = nn.Identity()
        return graph_module


def test_of_a_transformation_that_others_wrote() -> None:
    gm = attention()
    before = Portrait.of(gm)
    said = refold.explain(gm, Trains())
    assert said.transformation == "Trains()" and said
    assert before.differences(Portrait.of(gm), same_objects=True) == [] and not gm.training


def test_of_a_module_with_a_history() -> None:
    gm = attention()
    refold.MergeLinears()(gm)
    past = refold.history(gm)
    said = refold.explain(gm, refold.compose(refold.MergeLinears(), refold.ChangeTrueDivToMulByInverse()))
    assert len(said.rewritten) == 1 and refold.history(gm) is past and len(past) == 1


@pytest.mark.parametrize("raises", [False, True])
def test_a_find_that_edits_is_refused_and_nothing_is_touched(raises: bool) -> None:
    class FindEdits(Rewrite):
        def find(self, view: GraphView) -> Iterable[Site | Skip]:
            next(node for node in view.nodes if node.target == "softmax").target = "log_softmax"
            if raises:
                raise IndexError("half-way")
            return ()

        def rewrite(self, site: Site, edit: Editor) -> None:
            raise NotImplementedError

    gm = attention()
    before = Portrait.of(gm)
    with pytest.raises(IndexError if raises else refold.BrokenTransformation, match=r"half-way|must only look at it"):
        refold.explain(gm, FindEdits())
    assert before.differences(Portrait.of(gm), same_objects=True) == []


def test_bad_input() -> None:
    with pytest.raises(refold.NotAGraphModule):
        refold.explain(nn.Linear(1, 1), refold.MergeLinears())  # type: ignore[arg-type]
    with pytest.raises(refold.NotATransformation, match=r"MergeLinears\(\)"):
        refold.explain(attention(), refold.MergeLinears)  # type: ignore[arg-type]


def test_a_shared_copy_shares_memory_and_no_objects() -> None:
    gm = attention()
    shared = shared_copy(gm)
    assert shared.graph is not gm.graph and shared.value is not gm.value
    for name, parameter in gm.named_parameters():
        twin = shared.get_parameter(name)
        assert twin is not parameter and twin.data_ptr() == parameter.data_ptr()
        assert twin.requires_grad == parameter.requires_grad
    x = attention_layers.attention()[1]
    assert torch.equal(shared(*x), copy.deepcopy(gm)(*x))
