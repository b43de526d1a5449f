"""A snapshot of a module: whatever is done to the module after it, restoring gives everything back."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace

import refold
from refold.examples import attention_layers
from refold.record.module_tree import ModuleRecord, ModuleTree
from refold.record.nodes import MISSING, same_value
from refold.record.reversal import undo_chosen
from refold.record.snapshot import Snapshot
from refold.testing import Portrait


class Edit(refold.Transformation):
    """Somebody else's: one edit."""

    def __init__(self, edit: Callable[[GraphModule], object], fails: bool = False) -> None:
        self.edit = edit
        self.fails = fails

    def transform(self, graph_module: GraphModule) -> GraphModule:
        self.edit(graph_module)
        if self.fails:
            raise MemoryError
        return graph_module


def division(gm: GraphModule) -> torch.fx.Node:
    return next(n for n in gm.graph.nodes if n.target is operator.truediv)


def swap_class(gm: GraphModule) -> None:
    gm.value.__class__ = type("Other", (nn.Linear,), {})


def replace_table(gm: GraphModule) -> None:
    gm.value._parameters = {"weight": gm.value.weight, "bias": None}


def move_attribute(gm: GraphModule) -> None:
    gm.value.in_features, gm.value.out_features = gm.value.out_features, gm.value.in_features + 1


def freeze(gm: GraphModule) -> None:
    gm.value.requires_grad_(False)


def insert(gm: GraphModule) -> None:
    with gm.graph.inserting_after(division(gm)):
        gm.graph.call_function(torch.neg, (division(gm),))


def other_graph(gm: GraphModule) -> None:
    graph = Graph()
    graph.output(graph.placeholder("y"))
    gm.graph = graph


EDITS: list[Callable[[GraphModule], Any]] = [
    swap_class,
    replace_table,
    move_attribute,
    freeze,
    insert,
    lambda gm: setattr(division(gm), "name", "renamed"),
    lambda gm: setattr(division(gm), "target", operator.mul),
    lambda gm: gm.train(),
    lambda gm: delattr(gm, "out"),
    lambda gm: gm.add_module("more", nn.Sequential(nn.Linear(1, 1))),
    lambda gm: gm.value.register_forward_hook(lambda *_: None),
    lambda gm: gm.value.register_buffer("seen", torch.ones(1), persistent=False),
    lambda gm: setattr(gm.value, "bias", None),
    lambda gm: gm.add_module("twice", gm.value),
    lambda gm: setattr(gm.value, "weight", nn.Parameter(torch.zeros(6, 6))),
    other_graph,
    lambda gm: gm.meta.update(seen=1),
]


def attention() -> GraphModule:
    return symbolic_trace(attention_layers.attention()[0].eval())


def portrait(gm: GraphModule) -> Any:
    """What restoring gives back beyond a Portrait."""
    modules = {path: (type(m), list(m.__dict__), len(m._forward_hooks)) for path, m in gm.named_modules()}
    plain = {path: (m.in_features, m.out_features) for path, m in gm.named_modules() if isinstance(m, nn.Linear)}
    buffers = {path: set(m._non_persistent_buffers_set) for path, m in gm.named_modules()}
    return modules, plain, buffers, dict(gm.meta), [dict(n.meta) for n in gm.graph.nodes]


@given(st.lists(st.integers(0, len(EDITS) - 1), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_restoring_takes_any_edits_back(chosen: list[int]) -> None:
    gm = attention()
    before, more, held, graph = Portrait.of(gm), portrait(gm), [*gm.parameters()], gm.graph
    nodes = list(graph.nodes)
    snapshot = Snapshot.of(gm)
    for i in chosen:
        with suppress(AttributeError, StopIteration, KeyError):  # an edit before took away what this one needs
            EDITS[i](gm)
    snapshot.restore(gm)
    assert before.differences(Portrait.of(gm), same_objects=True) == [] and portrait(gm) == more
    assert gm.graph is graph and list(gm.graph.nodes) == nodes and held
    assert snapshot.later_state(gm).modules == {} and not snapshot.later_state(gm).written
    gm.graph.lint()
    gm.recompile()
    assert before.differences(Portrait.of(gm)) == []


@pytest.mark.parametrize("edit", EDITS[:-1], ids=range(len(EDITS) - 1))
def test_an_edit_is_seen_and_undone(edit: Callable[[GraphModule], object]) -> None:
    gm = attention()
    before, more, held = Portrait.of(gm), portrait(gm), [*gm.parameters()]
    Edit(edit)(gm, lint_and_recompile=False)
    assert len(refold.history(gm)) == 1 and refold.history(gm)[0].describe()
    refold.undo(gm)
    assert before.differences(Portrait.of(gm), same_objects=True) == [] and held
    now = portrait(gm)
    assert [now[i] == more[i] for i in (1, 2)] == [True, True]
    assert {path: part[0] for path, part in now[0].items()} == {path: part[0] for path, part in more[0].items()}


def test_a_renamed_node_has_its_readers_recorded() -> None:
    gm = attention()
    Edit(lambda gm: setattr(division(gm), "name", "renamed"))(gm)
    change = refold.history(gm)[0]
    assert "renamed" in change.created and "truediv" in change.erased and "softmax" in change.changed


def test_frozen_weights_are_thawed_by_undo_and_stay_so_in_a_copy() -> None:
    import copy

    gm = attention()
    gm.query.requires_grad_(False)
    Edit(lambda gm: [p.requires_grad_(False) for p in gm.parameters()])(gm)
    assert not any(p.requires_grad for p in gm.parameters())
    clone = copy.deepcopy(gm)
    for module in (gm, clone):
        refold.undo(module)
        assert all(p.requires_grad != name.startswith("query.") for name, p in module.named_parameters())


@pytest.mark.parametrize(
    "write",
    [lambda gm: setattr(gm.value.weight, "data", torch.zeros(6, 6)), lambda gm: gm.half()],
    ids=["replaced", "cast"],
)
def test_data_that_is_replaced_in_a_weight_that_stays_is_an_error(write: Callable[[GraphModule], object]) -> None:
    gm = attention()
    with pytest.raises(refold.BrokenTransformation, match=r"value\.weight.* in place, or replaced their data"):
        Edit(write)(gm)
    assert not refold.history(gm)


# --- the tree of modules -------------------------------------------------------------------------------------------


def test_what_is_untouched_is_not_looked_at_again() -> None:
    gm = attention()
    snapshot = Snapshot.of(gm)
    division(gm).target = operator.mul
    gm.recompile()
    later = snapshot.later_state(gm)
    rows = zip(later.graph.rows, snapshot.graph.rows, strict=True)
    assert set(later.modules) == {""} and [a[1] for a, b in rows if a is not b] == ["truediv"]


def test_an_attribute_of_another_name_with_the_same_value() -> None:
    """The same objects in the same order, under other names."""
    gm = attention()
    for name in ("first", "second", "third"):
        setattr(gm.value, name, None)
    snapshot = Snapshot.of(gm)
    del gm.value.first
    gm.value.fourth = None
    assert set(snapshot.later_state(gm).modules) == {"value"}
    snapshot.restore(gm)
    assert gm.value.first is None and not hasattr(gm.value, "fourth")


def test_equal_is_not_the_same() -> None:
    gm = attention()
    gm.value.scale = 1
    tree = ModuleTree(gm)
    gm.value.scale = 1.0
    changed = tree.changed_modules(tree.written())
    assert set(changed) == {"value"}
    before = tree.record_at("value")
    assert before is not None and before.changed_attributes(False) == {"scale": 1}


def test_modules_that_come_and_go() -> None:
    gm = attention()
    tree, value = ModuleTree(gm), gm.value
    gm.add_module("box", nn.Sequential(value))
    del gm.value
    found = tree.changed_modules(tree.written())
    assert set(found) == {"", "box", "box.0"} and found["box.0"].module is value
    assert not ModuleRecord.of(gm).has_children_of(tree.record(0))


def test_scripted_modules_are_carried_along() -> None:
    gm = attention()
    gm.add_module("scripted", torch.jit.script(nn.Linear(2, 2)))
    snapshot = Snapshot.of(gm)
    gm.value.note = 1
    snapshot.restore(gm)
    assert not hasattr(gm.value, "note") and "scripted.weight" not in snapshot.tensors()


def test_tensors_under_every_name() -> None:
    gm = attention()
    gm.again = gm.value
    names = Snapshot.of(gm).tensors()
    assert names["again.weight"] is names["value.weight"] and "value.bias" in names


# --- values --------------------------------------------------------------------------------------------------------


class Touchy:
    """Cannot be compared."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __eq__(self, other: object) -> bool:
        raise self.error

    __hash__ = object.__hash__


def test_what_cannot_be_compared_is_only_itself() -> None:
    touchy = Touchy(ValueError)
    assert same_value(touchy, touchy) and not same_value(touchy, Touchy(ValueError))


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_other_errors_of_a_comparison_are_not_swallowed(error: type[BaseException]) -> None:
    with pytest.raises(error):
        same_value(Touchy(error), Touchy(error))


def test_missing_survives_pickling() -> None:
    import pickle

    assert pickle.loads(pickle.dumps(MISSING)) is MISSING


def test_two_edits_of_one_attribute_are_undone_in_order_only() -> None:
    gm = attention()
    first, second, beside = (Edit(lambda gm, n=n, v=v: setattr(gm, n, v)) for n, v in [("a", 1), ("a", 2), ("b", 1)])
    for edit in (first, beside, second):
        edit(gm)
    with pytest.raises(refold.OutOfOrder):
        undo_chosen(gm, [0])
    undo_chosen(gm, [1])
    assert not hasattr(gm, "b") and gm.a == 2
    undo_chosen(gm, [1, 0])
    assert not hasattr(gm, "a")
