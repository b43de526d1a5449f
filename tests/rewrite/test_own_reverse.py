"""A transformation's own reverse is run and compared with the record; the record's exact result stays."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

import refold
from refold.errors import BrokenTransformation, ReverseMismatch
from refold.examples import attention_layers
from refold.rewrite.reverse_calls import Summary
from refold.testing import Portrait


class Negate(refold.ReversibleTransformation):
    """Puts a negation behind the division, twice, so that the result is the same."""

    preserves_computation = True
    calls: ClassVar[list[str]] = []

    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        node = next(n for n in graph.nodes if n.target is operator.truediv)
        with graph.inserting_after(node):
            first = graph.call_function(torch.neg, (node,))
        with graph.inserting_after(first):
            second = graph.call_function(torch.neg, (first,))
        node.replace_all_uses_with(second, delete_user_cb=lambda user: user is not first)
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        self.calls.append("reverse")
        for node in [n for n in reversed(graph_module.graph.nodes) if n.target is torch.neg]:
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)
        return graph_module


class Forgets(Negate):
    """Takes back only half."""

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        node = next(n for n in reversed(graph_module.graph.nodes) if n.target is torch.neg)
        node.replace_all_uses_with(node.args[0])
        graph_module.graph.erase_node(node)
        return graph_module


class Renames(Negate):
    """Its reverse leaves other names behind: the record gives the right ones back all the same."""

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        super().reverse(graph_module)
        next(n for n in graph_module.graph.nodes if n.target is operator.truediv).name = "quotient"
        return graph_module


class ReturnsAnother(Negate):
    def reverse(self, graph_module: GraphModule) -> GraphModule:
        return GraphModule(graph_module, graph_module.graph)


class Raises(Negate):
    def reverse(self, graph_module: GraphModule) -> GraphModule:
        super().reverse(graph_module)
        raise MemoryError


class Rescale(refold.ReversibleTransformation):
    """Doubles a weight and halves the outcome, with no weight map: only its own reverse knows the way back."""

    adds: float = 0.0

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return self._swap(graph_module, 2.0)

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        return self._swap(graph_module, 0.5)

    def _swap(self, gm: GraphModule, factor: float) -> GraphModule:
        layer = nn.Linear(6, 12)
        layer.bias = gm.value.bias
        layer.weight = nn.Parameter(gm.value.weight.detach() * factor + (self.adds if factor < 1 else 0))
        gm.value = layer
        return gm


def attention() -> GraphModule:
    return symbolic_trace(attention_layers.attention()[0].eval())


@pytest.mark.parametrize("t", [Negate(), Renames()], ids=repr)
def test_a_right_one_is_called_and_the_record_stays(t: Negate) -> None:
    gm = attention()
    before, held = Portrait.of(gm), [*gm.parameters()]
    t(gm)
    t.calls.clear()
    assert t(gm, reverse=True) is gm and t.calls == ["reverse"]
    assert before.differences(Portrait.of(gm), same_objects=True) == [] and held and not refold.history(gm)


@pytest.mark.parametrize(
    ("t", "error", "word"),
    [
        (Forgets(), ReverseMismatch, "does not give back what it transformed"),
        (ReturnsAnother(), BrokenTransformation, "must edit the module it is given"),
        (Raises(), MemoryError, "^$"),
    ],
    ids=["forgets", "returns another", "raises"],
)
def test_a_wrong_one_changes_nothing(t: Negate, error: type[Exception], word: str) -> None:
    gm = attention()
    start = Portrait.of(gm)
    t(gm)
    before, past = Portrait.of(gm), refold.history(gm)
    with pytest.raises(error, match=word):
        t(gm, reverse=True)
    assert before.differences(Portrait.of(gm), same_objects=True) == [] and refold.history(gm) is past
    refold.undo(gm)
    assert start.differences(Portrait.of(gm)) == []


def test_a_reverse_of_ones_own_does_not_run_where_nothing_was_transformed() -> None:
    class Counts(Negate):
        runs = 0

        def reverse(self, graph_module: GraphModule) -> GraphModule:
            Counts.runs += 1
            return super().reverse(graph_module)

    gm = attention()
    Counts()(gm, reverse=True)
    refold.MergeLinears()(gm)
    Counts()(gm, reverse=True)
    assert Counts.runs == 0 and len(refold.history(gm)) == 1
    Counts()(gm)
    Counts()(gm, reverse=True)
    assert Counts.runs == 1


def test_changed_weights_come_back_by_its_own_reverse() -> None:
    gm = attention()
    original = gm.value.weight.detach().clone()
    Rescale()(gm)
    gm.value.weight = nn.Parameter(gm.value.weight.detach() + 1)
    Rescale()(gm, reverse=True)
    assert torch.equal(gm.value.weight, (original * 2 + 1) * 0.5) and not refold.history(gm)
    gm.graph.lint()


def test_untouched_weights_come_back_exactly_and_a_wrong_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = attention()
    weight = gm.value.weight
    Rescale()(gm)
    with monkeypatch.context() as patch:
        patch.setattr(Rescale, "adds", 1.0)
        with pytest.raises(ReverseMismatch, match=r"value\.weight come back with other values"):
            Rescale()(gm, reverse=True)
    Rescale()(gm, reverse=True)
    assert gm.value.weight is weight


class Thresholds(refold.ReversibleTransformation):
    """A ReLU becomes a threshold, and a weight without a map is doubled; `back` makes the ReLU again."""

    def __init__(self, back: str) -> None:
        self.back = back

    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph_module.act, graph_module.scale = nn.Threshold(0, 0), nn.Parameter(graph_module.scale.detach() * 2)
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        made = {"gelu": nn.GELU(), "in place": nn.ReLU(inplace=True), "relu": nn.ReLU(), "nothing": graph_module.act}
        graph_module.act, graph_module.scale = made[self.back], nn.Parameter(graph_module.scale.detach() / 2)
        return graph_module


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.scale = nn.ReLU(), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x) * self.scale


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    ("back", "sentence"),
    [
        ("gelu", "the record has ReLU at act where GELU was found"),
        ("nothing", "the record has ReLU at act where Threshold was found"),
        ("in place", "act comes back with another inplace"),
    ],
)
def test_a_wrong_module_without_tensors_is_refused(back: str, sentence: str, trained: bool) -> None:
    gm, t = symbolic_trace(Scaled().eval()), Thresholds(back)
    t(gm)
    if trained:
        gm.scale = nn.Parameter(gm.scale.detach() + 1)
    before = Portrait.of(gm)
    with pytest.raises(ReverseMismatch, match=sentence):
        t(gm, reverse=True)
    assert before.differences(Portrait.of(gm)) == [] and len(refold.history(gm)) == 1


@pytest.mark.parametrize("trained", [False, True])
def test_a_right_module_in_another_mode_is_taken(trained: bool) -> None:
    gm, t = symbolic_trace(Scaled().eval()), Thresholds("relu")
    t(gm)
    if trained:
        gm.scale = nn.Parameter(gm.scale.detach() + 1)
    t(gm, reverse=True)
    assert type(gm.act) is nn.ReLU and not gm.act.training and not refold.history(gm)
    assert torch.equal(gm.scale, torch.full((3,), 1.5 if trained else 1.0))


class HalvesInPlace(Thresholds):
    def reverse(self, graph_module: GraphModule) -> GraphModule:
        graph_module.act = nn.ReLU()
        with torch.no_grad():
            graph_module.scale.div_(2)
        if self.back == "raises":
            raise MemoryError
        return graph_module


def test_one_that_writes_in_place_is_refused_and_told() -> None:
    gm = symbolic_trace(Scaled().eval())
    HalvesInPlace("relu")(gm)
    with pytest.raises(BrokenTransformation, match=r"the reverse of .* wrote into scale in place"):
        HalvesInPlace("relu")(gm, reverse=True)
    gm = symbolic_trace(Scaled().eval())
    HalvesInPlace("raises")(gm)
    with pytest.raises(MemoryError) as error:
        HalvesInPlace("raises")(gm, reverse=True)
    assert "had written into scale in place" in "".join(error.value.__notes__)


def test_outlines() -> None:
    gm: Any = attention()
    one = Summary.of(gm)
    assert one.differs_from(Summary.of(attention()), True) is None
    gm.value.extra = nn.Parameter(torch.ones(1))
    assert one.differs_from(Summary.of(gm), True) == "the tensors value.extra are in only one of the two"
    del gm.value.extra
    gm.value.bias = nn.Parameter(torch.ones(6) * 9)
    assert one.differs_from(Summary.of(gm), True) == "value.bias come back with other values"
    assert one.differs_from(Summary.of(gm), False) is None
