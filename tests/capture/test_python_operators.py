"""Captured calls as Python writes them: every row of the table means exactly the ATen call it stands for."""

from __future__ import annotations

import copy
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.fx import Graph, GraphModule, Node
from zoo_families import FAMILIES, captured_of

import refold
from refold.capture.python_operators import TABLE, use_python_operators
from refold.optimization.default_pipeline import default_pipeline

aten = torch.ops.aten
X, Y = torch.linspace(-2, 3, 12).reshape(3, 4), torch.linspace(1, 2, 12).reshape(3, 4)
MASK, INDICES = torch.tensor([[True, False, True, False]] * 3), torch.tensor([[0, 1], [2, 0], [1, 1]])
Q = torch.linspace(0, 1, 48).reshape(1, 2, 6, 4)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "pow.Tensor_Scalar": (X, 2),
    "pow.Tensor_Tensor": (Y, X),
    "log.default": (Y,),
    "sqrt.default": (Y,),
    "rsqrt.default": (Y,),
    "contiguous.default": (X.T,),
    "remainder.Scalar": (X, 2),
    "__and__.Tensor": (MASK, ~MASK),
    "__or__.Tensor": (MASK, ~MASK),
    "__xor__.Tensor": (MASK, ~MASK),
    "bitwise_not.default": (MASK,),
    "logical_not.default": (MASK,),
    "bmm.default": (Q[0], Q[0].mT.contiguous()),
    "mm.default": (X, Y.T),
    "matmul.default": (X, Y.T),
    "cat.default": ([X, Y], 1),
    "stack.default": ([X, Y], 1),
    "clamp.default": (X, -1, 1),
    "cumsum.default": (X, 1),
    "einsum.default": ("ij,ij->i", [X, Y]),
    "embedding.default": (X, INDICES),
    "gather.default": (X, 1, INDICES),
    "mean.dim": (X, [1], True),
    "sum.dim_IntList": (X, [1]),
    "softmax.int": (X, -1),
    "where.self": (MASK, X, Y),
    "linear.default": (X, torch.ones(5, 4), torch.ones(5)),
    "scaled_dot_product_attention.default": (Q, Q, Q),
    "expand.default": (X[:1], [3, -1]),
    "flatten.using_ints": (X, 0, 1),
    "masked_fill.Scalar": (X, MASK, 0.5),
    "masked_fill.Tensor": (X, MASK, torch.tensor(0.5)),
    "permute.default": (X, [1, 0]),
    "repeat.default": (X, [2, 1]),
    "reshape.default": (X, [4, 3]),
    "view.default": (X, [4, 3]),
    "squeeze.dim": (X[:1], 0),
    "to.dtype": (X, torch.float64),
    "transpose.int": (X, 0, 1),
    "unsqueeze.default": (X, 1),
    "sym_size.int": (X, 1),
}
TWO = ("add", "sub", "mul", "div", "floor_divide", "remainder", "pow", "eq", "ne", "lt", "le", "gt", "ge")


def arguments(name: str) -> tuple[Any, ...]:
    packet, _, kind = name.partition(".")
    default = (X, 1.5) if kind == "Scalar" else (X, Y) if packet in TWO else (X,)
    return ARGUMENTS.get(name, default)


def called(overload: Any, given: tuple[Any, ...]) -> tuple[GraphModule, tuple[torch.Tensor, ...]]:
    """A graph that is one call, with its tensors as inputs, and what capture records on nodes."""
    graph, tensors = Graph(), []

    def place(value: Any) -> Any:
        if isinstance(value, list) and any(isinstance(v, torch.Tensor) for v in value):
            return [place(v) for v in value]
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"x{len(tensors)}")
        node.meta["val"] = value
        tensors.append(value)
        return node

    placed = tuple(place(value) for value in given)
    graph.output(graph.call_function(overload, placed))
    return GraphModule(nn.Module(), graph), tuple(tensors)


@pytest.mark.parametrize("overload", TABLE, ids=str)
def test_a_row_means_exactly_its_aten_call(overload: Any) -> None:
    gm, inputs = called(overload, arguments(str(overload).removeprefix("aten.")))
    before = gm(*inputs)
    use_python_operators(gm)
    (node,) = [node for node in gm.graph.nodes if node.op.startswith("call")]
    assert node.target is not overload and node.target == TABLE[overload]
    after = gm(*inputs)
    assert after.equal(before) if isinstance(after, torch.Tensor) else after == before
    if isinstance(after, torch.Tensor):
        again = torch.export.export(gm, inputs, strict=False).graph
        checks = (aten._assert_tensor_metadata.default,)
        assert [n.target for n in again.nodes if n.op == "call_function" and n.target not in checks] == [overload]


def test_what_has_no_equal_stays() -> None:
    gm, _ = called(aten.add.Tensor, (X, Y))
    (node,) = gm.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    node.kwargs = {"alpha": 2}
    use_python_operators(gm)
    assert node.target is aten.add.Tensor
    node.kwargs, node.args = {}, (2, node.args[1])
    use_python_operators(gm)
    assert node.target is aten.add.Tensor, "a number in front is another call: __radd__"
    node.args = (node.args[1], 2)
    use_python_operators(gm)
    assert node.target is operator.add


# --- whole models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_the_same_bits_and_is_rewritten_as_often(family: str) -> None:
    _, args, kwargs, plain = captured_of(family)
    python = copy.deepcopy(plain)
    use_python_operators(python)
    left = [node for node in python.graph.nodes if node.target in TABLE and not node.kwargs]
    assert all(not isinstance(node.args[0], Node) for node in left), left
    assert all(map(torch.equal, tensors(plain(*args, **kwargs)), tensors(python(*args, **kwargs))))
    for t in default_pipeline("default"):
        found = [refold.explain(gm, t) for gm in (plain, python)]
        assert len(found[0].rewritten) == len(found[1].rewritten), f"{found[0]}\n{found[1]}"


def test_a_pass_of_the_old_documentation_works_verbatim() -> None:
    class MultiplicationsToAdditions(refold.ReversibleTransformation):
        def transform(self, graph_module: GraphModule) -> GraphModule:
            for node in graph_module.graph.nodes:
                if node.op == "call_function" and node.target == operator.mul:
                    node.target = operator.add
                    self.mark_as_transformed(node)
            return graph_module

        def reverse(self, graph_module: GraphModule) -> GraphModule:
            for node in self.get_transformed_nodes(graph_module):
                node.target = operator.mul
                self.mark_as_restored(node)
            return graph_module

    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=37
    )
    gm = refold.symbolic_trace(transformers.LlamaModel(config).eval(), input_names=["input_ids"])
    before = gm.code
    t = MultiplicationsToAdditions()
    t(gm)
    assert len(t.get_transformed_nodes(gm)) > 5 and gm.code != before
    t(gm, reverse=True)
    assert gm.code == before and not t.get_transformed_nodes(gm)


def test_how_it_was_captured_is_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Halves())
    gm = refold.trace(model, X, operators="python")
    assert operator.truediv in [node.target for node in gm.graph.nodes]
    refold.save(refold.ChangeTrueDivToMulByInverse()(gm), tmp_path / "saved")
    assert refold.load(tmp_path / "saved", model).code == gm.code


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


def tensors(output: Any) -> list[torch.Tensor]:
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else (output,)
    return [value for value in values if isinstance(value, torch.Tensor)]
