"""The API people know: calls, marks, signatures, composition, copies."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

import refold
from refold import (
    ChangeTrueDivToMulByInverse,
    DeepCopy,
    FuseBatchNorm2dInConv2d,
    FuseBiasInLinear,
    LintAndRecompile,
    MergeLinears,
    ReversibleTransformation,
    Transformation,
    compose,
)
from refold.examples import attention_layers
from refold.record.stack import settle
from refold.testing import Portrait


def attention() -> GraphModule:
    return symbolic_trace(attention_layers.attention()[0])


class Rename(ReversibleTransformation):
    """A transformation in the old style, with a reverse of its own."""

    def __init__(self, settings: Any = None) -> None:
        self.settings = settings

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.nodes:
            if node.target == "softmax":
                node.target = "log_softmax"
                self.mark_as_transformed(node)
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        for node in self.get_transformed_nodes(graph_module):
            node.target = "softmax"
            self.mark_as_restored(node)
        return graph_module


def test_defaults() -> None:
    assert Transformation.preserves_computation is False
    assert MergeLinears().preserves_computation and FuseBatchNorm2dInConv2d().preserves_computation
    assert isinstance(MergeLinears(), ReversibleTransformation)
    assert not isinstance(FuseBatchNorm2dInConv2d(), ReversibleTransformation)


def test_lint_and_recompile_can_wait() -> None:
    gm = attention()
    code = gm.code
    MergeLinears()(gm, lint_and_recompile=False)
    assert gm.code == code
    gm.recompile()
    assert "merged" in gm.code
    MergeLinears()(gm, lint_and_recompile=False, reverse=True)
    assert "merged" in gm.code
    gm.recompile()
    assert gm.code == code


def test_old_style_transformation_with_its_own_reverse() -> None:
    gm = attention()
    before = Portrait.of(gm)
    t = Rename()
    t(gm)
    assert [n.target for n in t.get_transformed_nodes(gm)] == ["log_softmax"]
    assert all(t.transformed(n) for n in t.get_transformed_nodes(gm))
    Rename()(gm, reverse=True)
    assert before.differences(Portrait.of(gm)) == [] and t.get_transformed_nodes(gm) == []


def test_marks_survive_pickle_and_deepcopy() -> None:
    gm = attention()
    t = MergeLinears()
    t(gm)
    marked = len(t.get_transformed_nodes(gm))
    assert marked == 4
    assert len(t.get_transformed_nodes(copy.deepcopy(gm))) == marked
    twin = pickle.loads(pickle.dumps(gm))
    settle(twin)
    assert len(t.get_transformed_nodes(twin)) == marked


def test_signature_is_equal_for_equal_settings_and_different_for_others() -> None:
    assert MergeLinears().signature == MergeLinears().signature
    assert MergeLinears().signature != FuseBiasInLinear().signature
    assert FuseBatchNorm2dInConv2d().signature != FuseBatchNorm2dInConv2d(keep="original").signature
    settings: list[Any] = [1, 1.0, True, "1", [1], (1,), {1}, {1: 2}, {1: 3}, None, torch.ones(2), torch.zeros(2)]
    settings += [torch.float16, lambda x: x + 1, lambda x: x + 2, nn.Linear, {"a": {"b": [1, {2}]}}]
    signatures = [Rename(s).signature for s in settings]
    assert len(set(signatures)) == len(settings)
    assert signatures == [Rename(copy.deepcopy(s)).signature for s in settings]
    assert all(isinstance(s, int) and s > 0 for s in signatures)


def test_signature_of_what_contains_itself() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert Rename(loop).signature == Rename(loop).signature


def test_signature_of_compositions() -> None:
    a, b = MergeLinears(), FuseBiasInLinear()
    assert compose(a, b).signature == compose(MergeLinears(), FuseBiasInLinear()).signature
    assert len({compose(*ts).signature for ts in [(), (a,), (b,), (a, b), (b, a), (a, b, a)]}) == 6


def test_signature_in_another_process_under_another_hash_seed() -> None:
    code = "import refold; print(refold.compose(refold.MergeLinears(), refold.FuseBatchNorm2dInConv2d()).signature)"
    here = compose(MergeLinears(), FuseBatchNorm2dInConv2d()).signature
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    there = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(there.stdout) == here


def test_compose_is_reversible_if_all_are() -> None:
    assert isinstance(compose(MergeLinears(), FuseBiasInLinear()), ReversibleTransformation)
    assert not isinstance(compose(MergeLinears(), FuseBatchNorm2dInConv2d()), ReversibleTransformation)
    assert isinstance(compose(), ReversibleTransformation)
    assert compose(MergeLinears()).preserves_computation and not compose(MergeLinears(), Rename()).preserves_computation


def test_empty_and_single_compositions() -> None:
    gm = attention()
    before = Portrait.of(gm)
    assert compose()(gm) is gm and compose()(gm, reverse=True) is gm
    assert before.differences(Portrait.of(gm), same_objects=True) == []
    single = compose(MergeLinears())
    assert single(gm) is gm and len(refold.history(gm)) == 1
    assert before.differences(Portrait.of(single(gm, reverse=True))) == []


def test_compose_lints_and_recompiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = attention()
    compiled = []
    recompile = GraphModule.recompile
    monkeypatch.setattr(GraphModule, "recompile", lambda self: (compiled.append(1), recompile(self))[1])
    compose(MergeLinears(), FuseBiasInLinear(), compose(ChangeTrueDivToMulByInverse()))(gm)
    assert len(compiled) == 1


def test_not_in_place_leaves_its_argument_alone_both_ways() -> None:
    gm = attention()
    before = Portrait.of(gm)
    t = compose(MergeLinears(), compose(FuseBiasInLinear(), inplace=False), inplace=False)
    folded = t(gm)
    assert folded is not gm and before.differences(Portrait.of(gm), same_objects=True) == []
    was = Portrait.of(folded)
    back = t(folded, reverse=True)
    assert back is not folded and was.differences(Portrait.of(folded), same_objects=True) == []
    assert before.differences(Portrait.of(back)) == []
    assert not refold.history(back) and len(refold.history(folded)) == 2


def test_one_composition_is_reversed_by_another_equal_one_and_by_its_parts() -> None:
    gm = attention()
    before = Portrait.of(gm)
    compose(MergeLinears(), ChangeTrueDivToMulByInverse())(gm)
    compose(MergeLinears(), ChangeTrueDivToMulByInverse())(gm, reverse=True)
    assert before.differences(Portrait.of(gm)) == []
    compose(MergeLinears(), ChangeTrueDivToMulByInverse())(gm)
    ChangeTrueDivToMulByInverse()(gm, reverse=True)
    MergeLinears()(gm, reverse=True)
    assert before.differences(Portrait.of(gm)) == []
    ChangeTrueDivToMulByInverse()(MergeLinears()(gm))
    compose(MergeLinears(), ChangeTrueDivToMulByInverse())(gm, reverse=True)
    assert before.differences(Portrait.of(gm)) == []


def test_a_composition_called_twice_is_reversed_call_by_call() -> None:
    gm = attention()
    start = Portrait.of(gm)
    both = compose(Rename(1), ChangeTrueDivToMulByInverse())
    both(gm)
    once = Portrait.of(gm)
    both(gm)  # nothing is left to do
    assert once.differences(Portrait.of(gm)) == []
    both(gm, reverse=True)
    assert start.differences(Portrait.of(gm)) == []
    both(gm, reverse=True)  # nothing is left to reverse
    assert start.differences(Portrait.of(gm)) == []


def test_deep_copy_and_lint_and_recompile() -> None:
    gm = attention()
    before = Portrait.of(gm)
    folded = compose(DeepCopy(), MergeLinears(), LintAndRecompile())(gm)
    assert folded is not gm and before.differences(Portrait.of(gm), same_objects=True) == []
    assert len(refold.history(folded)) == 1
    assert before.differences(Portrait.of(compose(DeepCopy(), MergeLinears())(folded, reverse=True))) == []
    gm.graph.nodes.__iter__()
    assert LintAndRecompile()(gm) is gm and LintAndRecompile()(gm, reverse=True) is gm


class ReturnsAnother(Transformation):
    """Rewrites a copy."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return MergeLinears().transform(copy.deepcopy(graph_module))


def test_a_transformation_that_returns_another_module() -> None:
    gm = attention()
    before = Portrait.of(gm)
    ChangeTrueDivToMulByInverse()(gm)
    other = ReturnsAnother()(gm)
    assert other is not gm and [c.name for c in refold.history(other)] == [
        "ChangeTrueDivToMulByInverse",
        "ReturnsAnother",
    ]
    assert len(refold.history(gm)) == 1
    refold.undo(other, None)
    assert before.differences(Portrait.of(other)) == []


def test_result_and_explain() -> None:
    gm = attention()
    foretold = refold.explain(gm, MergeLinears())
    MergeLinears()(gm)
    assert refold.result(gm) == foretold and bool(foretold)
    assert "merged query, key, value" in str(foretold) and "<table>" in foretold._repr_html_()
    combined = refold.explain(attention(), compose(MergeLinears(), ChangeTrueDivToMulByInverse()))
    assert len(combined.rewritten) == 2
    assert "No transformation was called" in str(refold.result(attention()))


def test_explain_of_a_foreign_transformation_touches_nothing() -> None:
    gm = attention()
    before = Portrait.of(gm)
    told = refold.explain(gm, Rename())
    assert told.rewritten and before.differences(Portrait.of(gm), same_objects=True) == []


def test_a_module_inside_a_module() -> None:
    inner = attention()
    MergeLinears()(inner)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner
            self.first = nn.Linear(6, 4)
            self.second = nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            return self.first(y) + self.second(y)

    class Leafy(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, qualified_name: str) -> bool:
            return isinstance(m, GraphModule) or super().is_leaf_module(m, qualified_name)

    model = Outer()
    gm = GraphModule(model, Leafy().trace(model))
    before = Portrait.of(gm)
    MergeLinears()(gm)
    assert len(refold.history(gm)) == 1 and len(refold.history(gm.inner)) == 1
    refold.undo(gm)
    assert before.differences(Portrait.of(gm)) == []
    refold.undo(gm.inner)
    assert "merged" not in gm.inner.code


def test_scripted_children() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scripted = torch.jit.script(nn.Linear(4, 4))
            self.first = nn.Linear(4, 3)
            self.second = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.scripted(x)
            return self.first(y) + self.second(y)

    gm = symbolic_trace(Holds())
    x = torch.randn(2, 4)
    before, expected = Portrait.of(gm), gm(x)
    MergeLinears()(gm)
    assert refold.history(gm)
    torch.testing.assert_close(gm(x), expected)
    twin = copy.deepcopy(gm)
    for module in (gm, twin):
        refold.undo(module)
        assert before.differences(Portrait.of(module)) == []
