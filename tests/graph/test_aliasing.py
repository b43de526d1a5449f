"""Which nodes write in place, and which values may share memory."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node, symbolic_trace

from refold import examples
from refold.graph.aliasing import makes_fresh, memory_roots, switches_mode, writes_to, written_by
from refold.graph.purity import is_pure


def graph(function: Callable[..., Any]) -> tuple[GraphModule, Node, Node]:
    """The graph of a function, its input and its last call."""
    gm = symbolic_trace(function)
    nodes = list(gm.graph.nodes)
    return gm, nodes[0], nodes[-2]


WRITES: dict[str, Callable[[Any], Any]] = {
    "method": lambda x: x.add_(1),
    "function": lambda x: torch.relu_(x),
    "inplace=True": lambda x: F.relu(x, inplace=True),
    "out=": lambda x: torch.neg(torch.ones(2), out=x),
    "copy_": lambda x: x.copy_(torch.ones(2)),
    "double underscore": lambda x: x.__iadd__(1),
    "running mean": lambda x: F.batch_norm(torch.ones(3, 2), x, None, None, None, True),
    "a table that is renormalised": lambda x: F.embedding(torch.ones(2), x, None, 1.0),
}
READS: dict[str, Callable[[Any], Any]] = {
    "method": lambda x: x.add(1),
    "function": lambda x: torch.relu(x),
    "inplace=False": lambda x: F.relu(x, inplace=False),
    "requires_grad_": lambda x: x.requires_grad_(),
    "double underscore": lambda x: x.__add__(1),
    "running mean": lambda x: F.batch_norm(torch.ones(3, 2), x, None),
    "a table": lambda x: F.embedding(torch.ones(2), x),
    "operator.and_": lambda x: operator.and_(x, x),
    "operator.or_": lambda x: operator.or_(x, 1),
}


@pytest.mark.parametrize("case", WRITES)
def test_writes(case: str) -> None:
    gm, x, call = graph(WRITES[case])
    assert written_by(gm, call) == [x]


@pytest.mark.parametrize("case", READS)
def test_reads(case: str) -> None:
    gm, _, call = graph(READS[case])
    assert written_by(gm, call) == []


@pytest.mark.parametrize("function", [operator.ilshift, operator.irshift, operator.iconcat, torch.Tensor.__iadd__])
def test_operators_that_write(function: Any) -> None:
    gm, x, call = graph(lambda x: x + 1)
    call.target = function
    assert written_by(gm, call) == [x] and not makes_fresh(gm, call)


MAY_RETURN: dict[str, Callable[[Any], Any]] = {
    "+x": lambda x: operator.pos(x),
    "einsum": lambda x: torch.einsum("ij->ji", x),
    "short": lambda x: x.short(),
    "out=": lambda x: torch.neg(torch.ones(2), out=x),
}


@pytest.mark.parametrize("case", MAY_RETURN)
def test_calls_that_may_return_their_argument(case: str) -> None:
    gm, x, call = graph(MAY_RETURN[case])
    assert not makes_fresh(gm, call) and x in memory_roots(gm, call)


@pytest.mark.parametrize("function, more", [(F.relu, ()), (F.dropout, (0.5, False)), (F.elu, (1.0,))])
def test_in_place_by_position(function: Any, more: tuple[Any, ...]) -> None:
    gm, x, call = graph(lambda x: x + 1)
    for inplace in (True, False):
        call.target, call.args = function, (x, *more, inplace)
        assert written_by(gm, call) == ([x] if inplace else [])
        assert makes_fresh(gm, call) == (not inplace and function is not F.dropout)


def test_joined_tuples_hold_what_they_held() -> None:
    gm, x, call = graph(lambda x: x + 1)
    call.args = ((x,), (1,))
    assert not makes_fresh(gm, call) and x in memory_roots(gm, call)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x


torch.library.define("refold_tests::packet", "(Tensor x) -> Tensor")
OTHERS = [max, tuple, Own.apply, torch.utils.checkpoint.checkpoint, torch.distributed.all_reduce]
OTHERS += [torch.ops.refold_tests.packet, torch.ops.refold_tests.packet.default]
OTHERS += [torch.ops.higher_order.wrap_with_set_grad_enabled]


@pytest.mark.parametrize("function", OTHERS, ids=lambda function: getattr(function, "__qualname__", str(function)))
def test_the_code_of_others_makes_nothing_of_its_own(function: Any) -> None:
    gm, x, call = graph(lambda x: x + 1)
    call.target, call.args = function, (x,)
    assert not makes_fresh(gm, call)
    assert function in (max, tuple) or not is_pure(gm, call)


def test_modules_with_others_inside_or_hooked() -> None:
    class Mine(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1)

    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, module: nn.Module, path: str) -> bool:
            return True

    model = nn.Sequential(nn.Sequential(Mine()), nn.ReLU(), nn.ReLU())
    model[1].register_forward_hook(lambda module, args, output: args[0])
    gm = GraphModule(model, Leaves().trace(model))
    calls = [n for n in gm.graph.nodes if n.op == "call_module"]
    assert [bool(written_by(gm, n)) for n in calls] == [True, True, False]
    assert [makes_fresh(gm, n) for n in calls] == [False, False, True]


def test_set_item_writes() -> None:
    gm = symbolic_trace(lambda x: x * 1)
    call = list(gm.graph.nodes)[1]
    with gm.graph.inserting_after(call):
        write = gm.graph.call_function(operator.setitem, (call, 0, 1.0))
    assert written_by(gm, write) == [call]


def test_modules() -> None:
    gm = symbolic_trace(nn.Sequential(nn.ReLU(inplace=True), nn.ReLU(), nn.Dropout(0.5)))
    x, writing, reading, dropout = list(gm.graph.nodes)[:4]
    assert written_by(gm, writing) == [x] and written_by(gm, reading) == []
    assert not makes_fresh(gm, writing) and makes_fresh(gm, reading) and not makes_fresh(gm, dropout)


def test_aten_by_schema() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 1
            y.add_(1)
            return y.view(-1)

    gm, _ = examples.exported((Writes(), (torch.ones(2, 2),)))
    add = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.add_.Tensor)
    view = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.view.default)
    assert [n.name for n in written_by(gm, add)] == ["mul"]
    assert not makes_fresh(gm, view) and {"mul", "add_"} & {n.name for n in memory_roots(gm, view)}


def test_a_write_through_a_view_is_found() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        view = y.view(-1)[1:].unsqueeze(0)
        view.mul_(2)
        return y

    gm = symbolic_trace(function)
    nodes = {n.name: n for n in gm.graph.nodes}
    assert writes_to(gm, nodes["mul"], [nodes["mul_"]]) is nodes["mul_"]
    assert writes_to(gm, nodes["x"], [nodes["mul_"]]) is None


def test_unknown_functions_may_return_their_argument() -> None:
    def mine(x: torch.Tensor) -> torch.Tensor:
        return x

    gm = symbolic_trace(lambda x: x * 1)
    call = list(gm.graph.nodes)[1]
    with gm.graph.inserting_after(call):
        unknown = gm.graph.call_function(mine, (call,))
    assert not makes_fresh(gm, unknown) and call in memory_roots(gm, unknown)


def test_methods_that_tensors_do_not_have_may_do_anything() -> None:
    gm, x, call = graph(lambda x: x.take_over(1))
    assert written_by(gm, call) == [x]
    assert not makes_fresh(gm, call) and x in memory_roots(gm, call)


def test_classes_only_hold_what_they_are_given() -> None:
    gm, x, _ = graph(lambda x: x + 1)
    with gm.graph.inserting_before(list(gm.graph.nodes)[-1]):
        held = gm.graph.call_function(Held, (x,))
    assert written_by(gm, held) == [] and not makes_fresh(gm, held)


class Held(NamedTuple):
    x: torch.Tensor


def test_mode_switches() -> None:
    gm = symbolic_trace(lambda x: x * 1)
    node = gm.graph.call_function(torch._C._set_grad_enabled, (False,))
    assert switches_mode(node) and not switches_mode(next(iter(gm.graph.nodes)))


@pytest.mark.parametrize("function", [operator.and_, operator.or_, operator.xor])
def test_bitwise_operators_make_a_new_tensor(function: Any) -> None:
    gm, _, call = graph(lambda x: function(x, 1))
    assert call.target is function
    assert written_by(gm, call) == [] and makes_fresh(gm, call) and memory_roots(gm, call) == {call}


@pytest.mark.parametrize("function", [operator.iand, operator.ior, torch.relu_])
def test_their_in_place_forms_do_not(function: Any) -> None:
    gm = symbolic_trace(lambda x: x * 1)
    first = list(gm.graph.nodes)[1]
    with gm.graph.inserting_after(first):
        call = gm.graph.call_function(function, (first, first) if function is not torch.relu_ else (first,))
    assert written_by(gm, call) == [first] and not makes_fresh(gm, call)
