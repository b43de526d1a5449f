"""The graph as it was left: edits made outside are noticed and named, and what pickling does is seen through."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import GraphModule, Node, symbolic_trace

from refold import fx_private
from refold.examples import attention_layers
from refold.record.nodes import record_node
from refold.record.outside_edits import ExpectedGraph, by_position, first_difference


def attention() -> GraphModule:
    return symbolic_trace(attention_layers.attention()[0].eval())


def named(gm: GraphModule, name: str) -> Node:
    return next(n for n in gm.graph.nodes if n.name == name)


def erase_unused(gm: GraphModule) -> None:
    node = gm.graph.call_function(torch.neg, (named(gm, "softmax"),))
    gm.graph.erase_node(node)


def insert(gm: GraphModule) -> None:
    with gm.graph.inserting_after(named(gm, "softmax")):
        gm.graph.call_function(torch.neg, (named(gm, "softmax"),))


EDITS: dict[str, tuple[Callable[[GraphModule], object], str]] = {
    "target": (lambda gm: setattr(named(gm, "truediv"), "target", operator.mul), "truediv"),
    "constant": (lambda gm: setattr(named(gm, "truediv"), "args", (named(gm, "matmul"), 7.0)), "7.0"),
    "argument": (lambda gm: setattr(named(gm, "softmax"), "args", (named(gm, "matmul"), -1)), "%matmul"),
    "keyword": (lambda gm: setattr(named(gm, "softmax"), "kwargs", {"dim": -1}), "dim"),
    "module": (lambda gm: setattr(named(gm, "value"), "target", "query"), "query"),
    "insertion": (insert, "neg"),
    "order": (lambda gm: named(gm, "transpose").append(named(gm, "value")), "value"),
}


def states(gm: GraphModule) -> dict[str, tuple[ExpectedGraph, GraphModule]]:
    """An expected graph with its module: live, of a copy, of a pickle."""
    expected = ExpectedGraph(gm.graph)
    clone, read = copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))
    return {
        "live": (expected, gm),
        "copy": (copy.deepcopy(expected), clone),
        "pickle": (pickle.loads(pickle.dumps(expected)), read),
    }


@pytest.mark.parametrize("state", ["live", "copy", "pickle"])
def test_an_untouched_graph_passes(state: str) -> None:
    expected, gm = states(attention())[state]
    code = gm.code
    assert not expected.settled(gm, 0).edits
    assert gm.code == code
    erase_unused(gm)
    assert not expected.settled(gm, 0).edits


@pytest.mark.parametrize("state", ["live", "copy", "pickle"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_noticed_and_named(edit: str, state: str) -> None:
    expected, gm = states(attention())[state]
    change, word = EDITS[edit]
    change(gm)
    before = [str(record_node(n)) for n in gm.graph.nodes]
    (found,) = expected.settled(gm, 0).edits
    assert word in found.what and found.writes
    assert [str(record_node(n)) for n in gm.graph.nodes] == before


def test_other_names_are_put_right() -> None:
    gm = attention()
    expected = copy.deepcopy(ExpectedGraph(gm.graph))
    names, code = [n.name for n in gm.graph.nodes], gm.code
    fx_private.rename_nodes(gm.graph, [f"n{i}" for i, _ in enumerate(names)])
    gm.recompile()
    assert not expected.settled(gm, 0).edits
    assert [n.name for n in gm.graph.nodes] == names and gm.code == code


class Constants(nn.Module):
    """What pickling changes most: a fetch before its use, a call on constants, an in-place operator."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(2))
        self.layer = nn.Linear(2, 2)

    def forward(self, x):  # type: ignore[no-untyped-def] # torch cannot pickle annotations that are strings
        return self.layer(x) + self.scale


def with_early_fetch() -> GraphModule:
    gm = symbolic_trace(Constants())
    add = next(n for n in gm.graph.nodes if n.target is operator.add)
    add.target = operator.iadd
    with gm.graph.inserting_after(add):
        ones = gm.graph.call_function(torch.ones, (2,))
    output = next(iter(reversed(gm.graph.nodes)))
    with gm.graph.inserting_before(output):
        output.args = (gm.graph.call_function(torch.mul, (add, ones)),)
    fetch = next(n for n in gm.graph.nodes if n.op == "get_attr")
    next(iter(gm.graph.nodes)).append(fetch)
    gm.recompile()
    return gm


def test_what_pickling_did_is_taken_back() -> None:
    gm = with_early_fetch()
    nodes = [str(record_node(n)) for n in gm.graph.nodes]
    keys = list(gm.state_dict())
    expected, read = states(gm)["pickle"]
    assert [str(record_node(n)) for n in read.graph.nodes] != nodes, "pickling changed nothing: nothing is tested"
    assert not expected.settled(read, 0).edits
    assert [str(record_node(n)) for n in read.graph.nodes] == nodes and list(read.state_dict()) == keys
    assert not [name for name in vars(read) if name.startswith("_tensor_constant")]


def test_a_constant_that_pickling_made_and_several_read() -> None:
    gm = with_early_fetch()
    ones = next(n for n in gm.graph.nodes if n.target is torch.ones)
    output = next(iter(reversed(gm.graph.nodes)))
    with gm.graph.inserting_before(output):
        output.args = (gm.graph.call_function(torch.add, (output.args[0], ones)),)
    gm.recompile()
    nodes = [str(record_node(n)) for n in gm.graph.nodes]
    expected, read = states(gm)["pickle"]
    assert not expected.settled(read, 0).edits
    assert [str(record_node(n)) for n in read.graph.nodes] == nodes
    assert not [name for name, _ in read.named_buffers()]


def test_the_same_edit_made_by_hand_is_an_edit() -> None:
    """Only a module that was pickled is given the benefit of the doubt."""
    gm = with_early_fetch()
    expected = ExpectedGraph(gm.graph)
    again = fx_private.retrace_as_pickle_does(gm)
    for name, tensor in again.named_buffers():
        gm.register_buffer(name, tensor)
    gm.graph = again.graph
    assert expected.settled(gm, 0).edits


def test_an_edit_after_pickling_is_no_pickling() -> None:
    expected, read = states(with_early_fetch())["pickle"]
    call = next(n for n in read.graph.nodes if n.op == "call_module")
    call.replace_all_uses_with(call.args[0])
    read.graph.erase_node(call)
    assert expected.settled(read, 0).edits


def test_a_graph_of_another_module_is_an_edit() -> None:
    """Building the expected graph fails there: its modules are missing."""
    expected, _ = states(attention())["pickle"]
    assert expected.settled(symbolic_trace(nn.Linear(2, 2)), 0).edits


def test_an_interrupt_while_a_retrace_is_tried_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, read = states(with_early_fetch())["pickle"]

    def scarce(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(fx_private, "retrace_as_pickle_does", scarce)
    with pytest.raises(MemoryError):
        expected.settled(read, 0)


@given(st.permutations(range(8)))
@settings(max_examples=30, deadline=None)
def test_names_do_not_matter_by_position(names: list[int]) -> None:
    gm = attention()
    count = len(gm.graph.nodes)
    before = [record_node(n) for n in gm.graph.nodes]
    fx_private.rename_nodes(gm.graph, [f"n{names[i % 8]}_{i}" for i in range(count)])
    after = [record_node(n) for n in gm.graph.nodes]
    assert first_difference(by_position(before), by_position(after)) is None
    assert first_difference(before, after) is not None
    assert first_difference(before, before[:-1]) == f"{count} nodes where {count - 1} were found"
