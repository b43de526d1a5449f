"""Every kind of bad input gets its own error, with a sentence, before anything is touched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node, symbolic_trace

import refold
from refold import ChangeTrueDivToMulByInverse, FuseBatchNorm2dInConv2d, FuseBiasInLinear, MergeLinears
from refold.examples import attention_layers, layers
from refold.graph.view import GraphView
from refold.rewrite.editor import Editor
from refold.rewrite.rule import Rewrite, Site
from refold.testing import Portrait

ERRORS = [getattr(refold, name) for name in refold.__all__ if name[0].isupper()]


def attention() -> GraphModule:
    return symbolic_trace(attention_layers.attention()[0])


def unchanged(before: Portrait, gm: nn.Module) -> bool:
    return before.differences(Portrait.of(gm), same_objects=True) == []


def test_every_error_is_a_refold_error() -> None:
    errors = [e for e in ERRORS if isinstance(e, type) and issubclass(e, Exception)]
    assert len(errors) >= 9 and all(issubclass(e, refold.RefoldError) for e in errors)


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), "model", None, nn.Linear, GraphModule], ids=repr)
def test_not_a_graph_module(thing: object) -> None:
    calls = [
        lambda: MergeLinears()(thing),  # type: ignore[arg-type]
        lambda: MergeLinears()(thing, reverse=True),  # type: ignore[arg-type]
        lambda: refold.compose(MergeLinears())(thing),  # type: ignore[arg-type]
        lambda: refold.undo(thing),  # type: ignore[arg-type]
        lambda: refold.history(thing),  # type: ignore[arg-type]
        lambda: refold.commit(thing),  # type: ignore[arg-type]
        lambda: refold.explain(thing, MergeLinears()),  # type: ignore[arg-type]
        lambda: MergeLinears().get_transformed_nodes(thing),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(refold.NotAGraphModule, match=r"a torch\.fx\.GraphModule is needed"):
            call()


def test_a_class_where_a_transformation_is_needed() -> None:
    with pytest.raises(refold.NotATransformation, match=r"class MergeLinears .* instance is needed: MergeLinears\(\)"):
        refold.compose(MergeLinears, FuseBiasInLinear())  # type: ignore[arg-type]
    with pytest.raises(refold.NotATransformation):
        refold.explain(attention(), MergeLinears)  # type: ignore[arg-type]
    with pytest.raises(refold.NotATransformation, match="a function was given"):
        refold.compose(lambda gm: gm)  # type: ignore[arg-type]


def test_reverse_of_what_was_never_transformed() -> None:
    gm = attention()
    before = Portrait.of(gm)
    for t in (MergeLinears(), refold.compose(MergeLinears(), FuseBiasInLinear())):
        assert t(gm, reverse=True) is gm
        assert str(refold.result(gm)).endswith("Nothing of it is in this module, so nothing was reversed.")
    with pytest.raises(refold.NothingToUndo):
        refold.undo(gm)
    assert unchanged(before, gm)


@pytest.mark.parametrize("n", [0, -1, 2])
def test_more_than_there_is_to_undo(n: int) -> None:
    gm = attention()
    MergeLinears()(gm)
    before = Portrait.of(gm)
    with pytest.raises(refold.NothingToUndo):
        refold.undo(gm, n)
    assert unchanged(before, gm) and len(refold.history(gm)) == 1


def test_out_of_order_that_is_not_safe() -> None:
    gm = symbolic_trace(layers.Gated(bias=True))
    MergeLinears()(gm)
    FuseBiasInLinear()(gm)
    before = Portrait.of(gm)
    with pytest.raises(refold.OutOfOrder, match=r"MergeLinears\(\) cannot be reversed before FuseBiasInLinear\(\)"):
        MergeLinears()(gm, reverse=True)
    assert unchanged(before, gm) and len(refold.history(gm)) == 2


def test_out_of_order_that_is_safe() -> None:
    gm = attention()
    start = Portrait.of(gm)
    held = [*gm.parameters()]
    FuseBiasInLinear()(gm)
    ChangeTrueDivToMulByInverse()(gm)
    FuseBiasInLinear()(gm, reverse=True)
    assert [c.name for c in refold.history(gm)] == ["ChangeTrueDivToMulByInverse"]
    ChangeTrueDivToMulByInverse()(gm, reverse=True)
    assert start.differences(Portrait.of(gm), same_objects=True) == [] and held


def edit_argument(gm: GraphModule) -> None:
    next(n for n in gm.graph.nodes if n.target == "softmax").args += ("dim",)


def edit_target(gm: GraphModule) -> None:
    next(n for n in gm.graph.nodes if n.target == "softmax").target = "log_softmax"


def erase_and_add(gm: GraphModule) -> None:
    node = next(n for n in gm.graph.nodes if n.target == "softmax")
    with gm.graph.inserting_after(node):
        twin = gm.graph.call_method("relu", (node,))
    node.replace_all_uses_with(twin)
    twin.args = (node,)


def move(gm: GraphModule) -> None:
    softmax = next(n for n in gm.graph.nodes if n.target == "softmax")
    with gm.graph.inserting_after(softmax):
        gm.graph.call_method("relu", (softmax,))
    next(n for n in gm.graph.nodes if n.target == "relu").append(softmax.next.next)


ELSEWHERE = [edit_argument, edit_target, erase_and_add, move]


@pytest.mark.parametrize("edit", ELSEWHERE)
@pytest.mark.parametrize("copied", [lambda gm: gm, copy.deepcopy], ids=["live", "copied"])
def test_an_edit_by_hand_elsewhere_stands_in_nobodys_way(edit: Any, copied: Any) -> None:
    expected, gm = attention(), attention()
    edit(expected)
    expected.recompile()
    MergeLinears()(gm)
    gm = copied(gm)
    edit(gm)
    assert refold.undo(gm).code == expected.code


@pytest.mark.parametrize("edit", ELSEWHERE)
@pytest.mark.parametrize("first", [0, 1])
def test_nor_does_one_between_two_changes(edit: Any, first: int) -> None:
    expected, gm = attention(), attention()
    edit(expected)
    expected.recompile()
    changes = [MergeLinears(), ChangeTrueDivToMulByInverse()]
    changes[0](gm)
    edit(gm)
    changes[1](gm)
    for t in (changes[first], changes[1 - first]):
        t(gm, reverse=True)
    assert gm.code == expected.code and not refold.history(gm)


def edit_merged(gm: GraphModule) -> None:
    next(n for n in gm.graph.nodes if "merged" in str(n.target)).target = "out.weight"


def edit_slice(gm: GraphModule) -> None:
    node = next(n for n in gm.graph.nodes if n.name == "key")
    node.args = (node.args[0], slice(1, 2))


def read_slice(gm: GraphModule) -> None:
    node = next(n for n in gm.graph.nodes if n.name == "key")
    with gm.graph.inserting_after(node):
        gm.graph.call_method("relu", (node,))


@pytest.mark.parametrize("edit", [edit_merged, edit_slice, read_slice])
@pytest.mark.parametrize("later", [False, True])
def test_graph_edited_by_hand(edit: Any, later: bool) -> None:
    gm = attention()
    MergeLinears()(gm)
    edit(gm)
    if later:
        ChangeTrueDivToMulByInverse()(gm)
        refold.undo(gm)
    gm.recompile()
    before = Portrait.of(gm)
    with pytest.raises(refold.GraphEdited, match=r"edited outside Refold.*refold\.commit"):
        refold.undo(gm)
    assert unchanged(before, gm) and len(refold.history(gm)) == 1
    twin = copy.deepcopy(gm)
    with pytest.raises(refold.GraphEdited):
        refold.undo(twin)


def test_merged_layer_taken_away_by_hand() -> None:
    gm = attention()
    MergeLinears()(gm)
    path = next(n.target for n in gm.graph.nodes if "merged" in n.name and n.op in ("call_module", "get_attr"))
    delattr(gm, str(path).split(".")[0])
    with pytest.raises(refold.GraphEdited, match="no longer in the module"):
        refold.undo(gm, lint_and_recompile=False)


class ReplaceWeight(refold.Transformation):
    """Somebody's own transformation, which says nothing about weights."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        weight = graph_module.out.weight
        graph_module.out = nn.Linear(*reversed(weight.shape))
        return graph_module


def test_weights_changed_without_a_map() -> None:
    gm = attention()
    original = gm.out.weight.detach().clone()
    ReplaceWeight()(gm)
    with torch.no_grad():
        gm.out.weight.data[0, 0] += 1  # a write that version counters do not see
    before = Portrait.of(gm)
    with pytest.raises(refold.WeightsChanged, match=r"out\.weight.*weights='original'.*refold\.commit"):
        refold.undo(gm)
    assert unchanged(before, gm) and len(refold.history(gm)) == 1
    refold.undo(gm, weights="original")
    assert torch.equal(gm.out.weight, original)


def test_weights_changed_with_a_map_but_without_an_inverse() -> None:
    model, _ = layers.conv_norm()
    with torch.no_grad():
        model.first_norm.weight[0] = 0
    gm = symbolic_trace(model)
    FuseBatchNorm2dInConv2d()(gm)
    with torch.no_grad():
        gm.first.weight.add_(1)
    before = Portrait.of(gm)
    with pytest.raises(refold.WeightsChanged, match=r"first\.weight"):
        refold.undo(gm)
    assert unchanged(before, gm)


def test_original_weights_that_were_kept() -> None:
    gm = symbolic_trace(layers.conv_norm()[0])
    start, held = Portrait.of(gm), [*gm.parameters()]
    FuseBatchNorm2dInConv2d(keep="original")(gm)
    with torch.no_grad():
        gm.first.weight.add_(1)
    refold.undo(gm, weights="original")
    assert start.differences(Portrait.of(gm), same_objects=True) == [] and held


def test_unknown_choice_of_weights() -> None:
    gm = attention()
    MergeLinears()(gm)
    with pytest.raises(ValueError, match="'carry' or 'original'"):
        refold.undo(gm, weights="latest")


class ReturnsNothing(refold.Transformation):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph_module.graph.erase_node(next(iter(reversed(graph_module.graph.nodes))))
        return None  # type: ignore[return-value]


class WritesInPlace(refold.Transformation):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        with torch.no_grad():
            graph_module.out.bias.add_(1)
        return graph_module


def test_broken_transformations() -> None:
    gm = attention()
    before = Portrait.of(gm)
    with pytest.raises(refold.BrokenTransformation, match="returned nothing"):
        ReturnsNothing()(gm)
    assert unchanged(before, gm)
    with pytest.raises(refold.BrokenTransformation, match=r"wrote into out\.bias in place"):
        WritesInPlace()(gm)
    assert not refold.history(gm)


class WritesInPlaceAndFails(refold.Transformation):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        WritesInPlace().transform(graph_module)
        graph_module.out.weight.data = graph_module.out.weight.detach() * 2
        raise IndexError("half-way")


class BreaksEverything(refold.Transformation):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph_module._modules["out"] = "no module"  # type: ignore[assignment]
        raise IndexError("half-way")


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: refold.compose(MergeLinears(), t)], ids=["alone", "composed"])
def test_a_call_that_writes_in_place_and_then_fails_says_what_is_lost(wrap: Any) -> None:
    with pytest.raises(IndexError, match="half-way") as error:
        wrap(WritesInPlaceAndFails())(attention())
    (note,) = error.value.__notes__
    assert "had written into out.weight, out.bias in place" in note and "the values of these tensors were not" in note


def test_a_call_that_fails_says_nothing_more_where_nothing_is_lost() -> None:
    gm = attention()
    before = Portrait.of(gm)
    with pytest.raises(IndexError, match="half-way") as error:
        BreaksEverything()(gm)
    assert not hasattr(error.value, "__notes__") and unchanged(before, gm)


def finding(found: Callable[[Node], Any]) -> Rewrite:
    """A rewrite that takes out the softmax, and finds what it is told to find at it."""

    class Faulty(Rewrite):
        def find(self, view: GraphView) -> Any:
            softmax = [node for node in view.nodes if node.target == "softmax"]
            return found(softmax[0]) if softmax else ()

        def rewrite(self, site: Site, edit: Editor) -> None:
            if site.what != "do nothing":
                before = site.nodes[0].all_input_nodes[0]
                edit.replace_uses(site.nodes[0], before)
                edit.erase(site.nodes[0])
                if site.what == "too much":
                    edit.replace_uses(before, before.all_input_nodes[0])
                    edit.erase(before)

    return Faulty()


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (lambda node: [Site((node,), "do nothing")], r"Faulty\(\) still finds a place to rewrite after 1000 rounds"),
        (
            lambda node: [Site((node,), "too much"), Site((node.all_input_nodes[0],), "two")],
            r"erased truediv of 'two' when it rewrote another place",
        ),
        (lambda node: [Site((node,), "one"), "two"], r"gave 'two', and must give only Site and Skip"),
        (lambda node: None, r"gave None, and must give only Site and Skip"),
    ],
    ids=["endless", "erases too much", "text", "nothing"],
)
def test_faulty_rewrites(found: Callable[[Node], Any], sentence: str) -> None:
    gm = attention()
    before = Portrait.of(gm)
    with pytest.raises(refold.BrokenTransformation, match=sentence):
        finding(found)(gm)
    assert unchanged(before, gm) and not refold.history(gm)


def test_a_site_that_overlaps_waits_for_the_next_round() -> None:
    gm = finding(lambda node: [Site((node,), "one"), Site((node,), "two"), Site((), "two", needs=(node,))])(attention())
    assert [site.what for site in refold.result(gm).rewritten] == ["one"]


def test_settings_with_a_few_values() -> None:
    for make in (refold.FoldBatchNorm, FuseBatchNorm2dInConv2d, refold.FuseBatchNorm1dInLinear, refold.MergeLora):
        with pytest.raises(ValueError, match="keep must be 'correction' or 'original', not 'orignal'"):
            make(keep="orignal")
        assert make(keep="original").keep == "original"

    @dataclass(frozen=True, kw_only=True, repr=False)
    class Own(refold.Transformation):
        side: Literal["left", 2] = "left"
        other: str = "anything"

        def transform(self, graph_module: GraphModule) -> GraphModule:
            return graph_module

    assert Own(side=2, other="x").side == 2
    with pytest.raises(ValueError, match="side must be 'left' or 2, not 'right'"):
        Own(side="right")  # type: ignore[arg-type]


def test_mark_as_restored_of_a_node_that_was_not_marked() -> None:
    gm = attention()
    t = MergeLinears()
    with pytest.raises(ValueError, match="was not marked as transformed"):
        t.mark_as_restored(next(iter(gm.graph.nodes)))
    t(gm)
    node = t.get_transformed_nodes(gm)[0]
    t.mark_as_restored(node)
    assert not t.transformed(node)
    assert node not in t.get_transformed_nodes(gm)


@pytest.mark.parametrize("n", [0, -1, 2, 1.5, "all"])
def test_a_number_of_changes_that_is_none(n: object) -> None:
    gm = attention()
    MergeLinears()(gm)
    before = Portrait.of(gm)
    with pytest.raises(refold.NothingToUndo, match=r"cannot be undone: the module carries 1 \(None undoes all"):
        refold.undo(gm, n)  # type: ignore[arg-type]
    assert unchanged(before, gm) and len(refold.history(gm)) == 1
