"""The quick look at a graph never passes what torch's own lint refuses, and passes what our rewrites make."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace

from refold.linting import is_surely_well_formed, lint


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale + x.relu()


def traced() -> GraphModule:
    return symbolic_trace(Nested())


def node(gm: GraphModule, op: str) -> torch.fx.Node:
    return next(n for n in gm.graph.nodes if n.op == op)


def unknown_op(gm: GraphModule) -> None:
    object.__setattr__(node(gm, "call_method"), "op", "call_nothing")


def foreign_argument(gm: GraphModule) -> None:
    node(gm, "call_method").args = (Graph().placeholder("foreign"),)


def used_too_early(gm: GraphModule) -> None:
    later = next(n for n in gm.graph.nodes if n.target is operator.add)
    node(gm, "call_module").args = (later,)


def used_by_itself(gm: GraphModule) -> None:
    node(gm, "call_module").args = (node(gm, "call_module"),)


def name_taken_twice(gm: GraphModule) -> None:
    object.__setattr__(node(gm, "call_method"), "name", node(gm, "get_attr").name)


def not_listed(gm: GraphModule) -> None:
    gm.graph._find_nodes_lookup_table.remove(node(gm, "call_method"))


def uncallable_function(gm: GraphModule) -> None:
    object.__setattr__(next(n for n in gm.graph.nodes if n.op == "call_function"), "target", 5)


def method_that_is_no_name(gm: GraphModule) -> None:
    object.__setattr__(node(gm, "call_method"), "target", torch.relu)


def missing_module(gm: GraphModule) -> None:
    node(gm, "call_module").target = "inner.7"


def module_that_is_none(gm: GraphModule) -> None:
    gm.inner._modules["0"] = None


def tensor_called_as_a_module(gm: GraphModule) -> None:
    node(gm, "call_module").target = "scale"


def missing_parameter(gm: GraphModule) -> None:
    del gm.scale


def node_of_another_graph(gm: GraphModule) -> None:
    object.__setattr__(node(gm, "call_method"), "graph", Graph())


BREAKS: list[Callable[[GraphModule], None]] = [
    unknown_op,
    foreign_argument,
    used_too_early,
    used_by_itself,
    name_taken_twice,
    not_listed,
    uncallable_function,
    method_that_is_no_name,
    missing_module,
    module_that_is_none,
    tensor_called_as_a_module,
    missing_parameter,
    node_of_another_graph,
]


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda f: f.__name__)
def test_what_lint_refuses_is_refused_with_its_words(break_it: Callable[[GraphModule], None]):
    gm = traced()
    assert is_surely_well_formed(gm.graph)
    break_it(gm)
    with pytest.raises(Exception) as theirs:
        gm.graph.lint()
    with pytest.raises(type(theirs.value)) as ours:
        lint(gm.graph)
    assert str(ours.value) == str(theirs.value)


def test_what_is_plain_is_accepted_without_asking(monkeypatch: pytest.MonkeyPatch):
    gm = traced()
    monkeypatch.setattr(Graph, "lint", lambda self: pytest.fail("there was no doubt"))
    lint(gm.graph)
    gm.graph.owning_module = None
    lint(gm.graph)


def test_what_is_right_in_an_unusual_way_is_left_to_torch():
    gm = traced()
    gm.constant = torch.ones(2)  # a plain attribute
    node(gm, "get_attr").target = "constant"
    assert is_surely_well_formed(gm.graph)
    gm.inner.__dict__["plain"] = nn.ReLU()  # a module that is in no table
    node(gm, "call_module").target = "inner.plain"
    assert not is_surely_well_formed(gm.graph)
    lint(gm.graph)
