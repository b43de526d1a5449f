"""Lists, dicts and sets inside modules that somebody writes into: noticed, undone, and put back in place."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, defaultdict, deque
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import GraphModule, symbolic_trace

import refold
from refold.record.containers import (
    KINDS,
    ContainerCopies,
    FormerItems,
    copy_nested,
    fill,
    inside,
    same_items,
)


class Keeper(nn.Module):
    """A module that keeps things."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Leaf(nn.Linear):
    """A leaf of the trace that keeps things."""


Leaf.__module__ = "torch.nn.fake"  # so that symbolic_trace does not look inside


def keeping(kept: Any) -> GraphModule:
    torch.manual_seed(0)
    model = nn.Sequential(Leaf(2, 2), nn.ReLU())
    model[0].kept = kept
    return symbolic_trace(model)


class Write(refold.Transformation):
    """Somebody else's: writes into what a module keeps, and into the graph."""

    def __init__(self, write: Any, fails: bool = False) -> None:
        self.write = write
        self.fails = fails

    def transform(self, graph_module: GraphModule) -> GraphModule:
        self.write(graph_module.get_submodule("0").kept)
        next(n for n in graph_module.graph.nodes if n.op == "call_module").meta["seen"] = True
        if self.fails:
            raise RuntimeError("half-way")
        return graph_module


WRITES = {
    "append": ([1, 2], lambda kept: kept.append(3)),
    "an empty list": ([], lambda kept: kept.append(3)),
    "clear": ([1, 2], lambda kept: kept.clear()),
    "reorder": ([1, 2], lambda kept: kept.reverse()),
    "another kind": ([1, 2], lambda kept: kept.__setitem__(0, 1.0)),
    "dict": ({"a": 1}, lambda kept: kept.update(b=2)),
    "order of a dict": ({"a": 1, "b": 2}, lambda kept: kept.update(a=kept.pop("a"))),
    "set": ({1}, lambda kept: kept.add(2)),
    "ordered dict": (OrderedDict(a=1), lambda kept: kept.pop("a")),
    "default dict": (defaultdict(list, a=[1]), lambda kept: kept["b"].append(1)),
    "queue": (deque([1, 2], maxlen=2), lambda kept: kept.append(3)),
    "list in dict": ({"a": [1]}, lambda kept: kept["a"].append(2)),
    "list in tuple in list": ([([1],)], lambda kept: kept[0][0].append(2)),
    "an empty list in a dict": ({"a": []}, lambda kept: kept["a"].append(2)),
    "list replaced in dict": ({"a": [1]}, lambda kept: kept.update(a=[2])),
}


@pytest.mark.parametrize(("kept", "write"), WRITES.values(), ids=WRITES)
def test_a_write_is_undone(kept: Any, write: Any) -> None:
    gm = keeping(copy.deepcopy(kept))
    live = gm.get_submodule("0").kept
    Write(write)(gm)
    assert repr(live) != repr(kept)
    refold.undo(gm)
    assert gm.get_submodule("0").kept is live and repr(live) == repr(kept)


@pytest.mark.parametrize(("kept", "write"), WRITES.values(), ids=WRITES)
def test_a_write_of_a_call_that_fails_is_taken_back(kept: Any, write: Any) -> None:
    gm = keeping(copy.deepcopy(kept))
    live = gm.get_submodule("0").kept
    parts = inside([live])
    with pytest.raises(RuntimeError, match="half-way"):
        Write(write, fails=True)(gm)
    assert gm.get_submodule("0").kept is live and repr(live) == repr(kept)
    assert all(map(lambda a, b: a is b, inside([live]), parts)), "other lists stand inside"


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda gm: pickle.loads(pickle.dumps(gm))], ids=["deepcopy", "pickle"]
)
def test_a_copy_undoes_its_own(copied: Any) -> None:
    gm = keeping({"a": [1]})
    Write(WRITES["list in dict"][1])(gm)
    if copied is not copy.deepcopy:
        gm.get_submodule("0").__class__ = nn.Linear  # a class that a pickle finds again
    clone = copied(gm)
    refold.undo(clone)
    assert clone.get_submodule("0").kept == {"a": [1]} and gm.get_submodule("0").kept == {"a": [1, 2]}
    refold.undo(gm)
    assert gm.get_submodule("0").kept == {"a": [1]}


def test_a_container_that_is_written_into_and_replaced() -> None:
    def write(kept: Any) -> None:
        kept.append(2)

    class Replace(Write):
        def transform(self, graph_module: GraphModule) -> GraphModule:
            super().transform(graph_module)
            graph_module.get_submodule("0").kept = "something else"
            return graph_module

    gm = keeping([1])
    Replace(write)(gm)
    refold.undo(gm)
    assert gm.get_submodule("0").kept == [1]


def test_an_attribute_of_the_graph_module_itself() -> None:
    gm = keeping([])
    gm.notes = ["old"]

    class Note(refold.Transformation):
        def transform(self, graph_module: GraphModule) -> GraphModule:
            graph_module.notes.append("new")
            return graph_module

    Note()(gm)
    assert gm.notes == ["old", "new"] and refold.history(gm)[0].describe() == ["~ the module: notes"]
    refold.undo(gm)
    assert gm.notes == ["old"]


def test_what_is_read_only_is_no_change() -> None:
    gm = keeping({"a": [1]})
    Write(lambda kept: kept["a"].append(kept["a"].pop()))(gm)
    assert not refold.history(gm)


# --- the parts -----------------------------------------------------------------------------------------------------

values = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


def containers_of(value: Any) -> list[Any]:
    return [*([value] if type(value) in KINDS else []), *inside([value] if type(value) in KINDS else [])]


@given(st.lists(values, min_size=1, max_size=3), st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_is_written_comes_back(value: list[Any], data: st.DataObject) -> None:
    shown = repr(value)
    held = ContainerCopies(containers_of(value))
    former = {id(container): saved for container, saved in held}
    assert held.written() == []
    for container in data.draw(st.lists(st.sampled_from(held.live), max_size=3)):
        data.draw(st.sampled_from([_clear, _grow]))(container)
    assert repr(copy_nested(value, former)) == shown
    written = bool(held.written())
    assert written == (repr(value) != shown)
    live = {"kept": value}
    FormerItems(copy_nested(value, former)).restore_into(live, "kept")
    assert live["kept"] is value and repr(value) == shown
    _grow(value)
    held.restore()
    assert repr(value) == shown and held.written() == []


def _clear(container: Any) -> None:
    container.clear()


def _grow(container: Any) -> None:
    fill(container, {**container, "new": 1} if isinstance(container, dict) else [*container, 1])


def test_a_container_in_itself() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    held = ContainerCopies(containers_of(loop))
    former = {id(container): saved for container, saved in held}
    loop.append(2)
    again = copy_nested(loop, former)
    assert len(again) == 2 and again[1] is again
    FormerItems(again).restore_into({"kept": loop}, "kept")
    assert loop[0] == 1 and len(loop) == 2


def test_identity_counts_not_equality() -> None:
    assert same_items([1, 2], [1, 2]) and not same_items([1], [1.0]) and not same_items([1], [True])
    one, two = torch.ones(1), torch.ones(1)
    assert not same_items([one], [two]) and not same_items({"a": one}, {"a": two})
    assert not same_items({"a": 1, "b": 2}, {"b": 2, "a": 1}) and not same_items({1}, {1, 2})


@pytest.mark.parametrize(
    "other", [{"a": 1.0, "b": None}, {"a": True, "b": None}, {"b": None, "a": 1}, {"a": 1, "c": None}, {"a": 1}]
)
def test_dicts_are_compared_by_keys_order_and_identity(other: dict[str, Any]) -> None:
    held: dict[str, Any] = {"a": 1, "b": None}
    assert same_items(held, held.copy()) and not same_items(held, other)


def test_only_containers_are_asked_whether_they_are_empty() -> None:
    """A tensor, or an object with a mind of its own, may raise."""

    class Moody:
        def __bool__(self) -> bool:
            raise RuntimeError("do not ask")

        __eq__ = __len__ = __bool__  # type: ignore[assignment]
        __hash__ = object.__hash__

    gm = symbolic_trace(Keeper([]))
    gm.kept, gm.mood, gm.moods = torch.ones(2), Moody(), [Moody()]
    refold.ChangeTrueDivToMulByInverse()(gm)
    assert gm.moods and isinstance(gm.mood, Moody)
