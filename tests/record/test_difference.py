"""The difference of two snapshots: what edits add up to, in which places, and in how few words."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from refold.examples import attention_layers
from refold.record.change import Change
from refold.record.difference import difference
from refold.record.nodes import same_value
from refold.record.snapshot import Snapshot


def attention() -> GraphModule:
    return symbolic_trace(attention_layers.attention()[0])


def change_by(gm: GraphModule, *edits: object) -> Change | None:
    before = Snapshot.of(gm)
    for edit in edits:
        edit(gm)  # type: ignore[operator]
    return difference(before, before.later_state(gm))


def node(gm: GraphModule, name: str) -> torch.fx.Node:
    return next(n for n in gm.graph.nodes if n.name == name)


def test_nothing() -> None:
    assert change_by(attention()) is None
    assert change_by(attention(), lambda gm: gm.recompile()) is None


def test_an_edit_that_is_taken_back_is_nothing() -> None:
    def there_and_back(gm: GraphModule) -> None:
        node(gm, "truediv").target = operator.mul
        node(gm, "truediv").target = operator.truediv

    assert change_by(attention(), there_and_back) is None


def test_changed_arguments_of_equal_value_but_other_kind_count() -> None:
    def to_float(gm: GraphModule) -> None:
        n = node(gm, "truediv")
        n.args = (n.args[0], 7.0)

    change = change_by(attention(), to_float)
    assert change is not None
    assert change.describe() == [
        "~ truediv = call_function truediv(%matmul, 7)  ->  truediv = call_function truediv(%matmul, 7.0)"
    ]


def test_moved_nodes_are_few() -> None:
    gm = attention()
    change = change_by(gm, lambda gm: node(gm, "transpose").append(node(gm, "value")))
    assert change is not None and change.moved == ("value",) and not change.changed


def test_modules_and_attributes() -> None:
    def edit(gm: GraphModule) -> None:
        gm.add_module("new", nn.ReLU())
        gm.out.note = 1
        del gm.query

    change = change_by(attention(), edit)
    assert change is not None
    assert set(change.describe()) == {"- query", "+ new", "~ out: note"}
    assert {"query", "new", "out"} <= change.writes


def test_reads_and_writes_decide_what_is_in_the_way() -> None:
    gm = attention()

    def first(gm: GraphModule) -> None:
        node(gm, "truediv").target = operator.mul

    def beside(gm: GraphModule) -> None:
        node(gm, "value").target = "query"

    def upon(gm: GraphModule) -> None:
        n = node(gm, "softmax")
        n.args = (n.args[0], -2)

    a, b, c = (change_by(gm, edit) for edit in (first, beside, upon))
    assert a is not None and b is not None and c is not None
    assert not a.conflicts_with(b) and a.conflicts_with(c)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (True, 1, False),
        (0.0, -0.0, False),
        (float("nan"), float("nan"), True),
        ((1, [2]), (1, [2]), True),
        ((1, 2), [1, 2], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, False),
        (slice(1, 2), slice(1, 2), True),
        (slice(1, 2), slice(1, 2, 1), False),
        (torch.float32, torch.float32, True),
    ],
)
def test_same_value(a: object, b: object, same: bool) -> None:
    assert same_value(a, b) is same


def test_a_tensor_is_only_itself() -> None:
    one = torch.ones(2)
    assert same_value(one, one) and not same_value(one, one.clone())
