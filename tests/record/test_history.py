"""The history goes where the module goes, sees through what torch does to graphs, and says what it holds.

(Annotations are real classes here, not strings: torch cannot unpickle the graph of a model whose annotations are.)
"""

import copy
import io
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, symbolic_trace

import refold
from refold import ChangeTrueDivToMulByInverse, FuseBatchNorm2dInConv2d, FuseBiasInLinear, MergeLinears, examples
from refold.examples import attention_layers, layers
from refold.testing import Portrait


class FromFunction(refold.Transformation):
    """A transformation that is a function."""

    def __init__(self, function: Callable[[GraphModule], GraphModule]) -> None:
        self.function = function

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return self.function(graph_module)


def attention() -> GraphModule:
    return symbolic_trace(attention_layers.attention()[0])


def test_printable_countable_iterable() -> None:
    gm = attention()
    assert len(refold.history(gm)) == 0 and str(refold.history(gm)) == "no changes" and not refold.history(gm)
    MergeLinears()(gm)
    ChangeTrueDivToMulByInverse()(gm)
    past = refold.history(gm)
    assert len(past) == 2 and [c.name for c in past] == ["MergeLinears", "ChangeTrueDivToMulByInverse"]
    text = str(past)
    assert "1. MergeLinears()" in text and "~ truediv = call_function truediv(%matmul, 7)  ->" in text
    assert "- query" in text and "+ query_key_value_merged" in text
    assert "<table>" in past._repr_html_() and past[0].name == "MergeLinears"


def test_bytes_held() -> None:
    gm = symbolic_trace(layers.conv_norm()[0])
    FuseBatchNorm2dInConv2d(keep="original")(gm)
    kept = refold.history(gm).nbytes
    refold.undo(gm)
    FuseBatchNorm2dInConv2d()(gm)
    assert 0 < refold.history(gm).nbytes < kept


def test_commit_detach_attach() -> None:
    gm = attention()
    before = Portrait.of(gm)
    MergeLinears()(gm)
    past = refold.detach(gm)
    rebuilt = GraphModule(gm, copy.deepcopy(gm.graph))
    assert not refold.history(gm) and not refold.history(rebuilt)
    refold.attach(rebuilt, past)
    assert before.differences(Portrait.of(refold.undo(rebuilt))) == []
    MergeLinears()(rebuilt)
    refold.commit(rebuilt)
    assert not refold.history(rebuilt)
    with pytest.raises(refold.NothingToUndo):
        refold.undo(rebuilt)


def through_pickle(gm: GraphModule) -> GraphModule:
    return pickle.loads(pickle.dumps(gm))  # type: ignore[no-any-return]


def through_save(gm: GraphModule) -> GraphModule:
    memory = io.BytesIO()
    torch.save(gm, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)  # type: ignore[no-any-return]


TRIPS: dict[str, Callable[[GraphModule], GraphModule]] = {
    "pickle": through_pickle,
    "torch.save": through_save,
    "pickle twice": lambda gm: through_pickle(through_pickle(gm)),
    "pickle, deepcopy": lambda gm: copy.deepcopy(through_pickle(gm)),
    "deepcopy, pickle": lambda gm: through_pickle(copy.deepcopy(gm)),
    "deepcopy twice": lambda gm: copy.deepcopy(copy.deepcopy(gm)),
}


class InPlace(nn.Module):
    """`+=` as a call, which a retrace turns into `+`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)


def with_iadd() -> GraphModule:
    gm = symbolic_trace(InPlace())
    next(n for n in gm.graph.nodes if n.target is operator.add).target = operator.iadd
    gm.recompile()
    return gm


class Fetches(nn.Module):
    """Parameters fetched long before their use, and a call on constants only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 4))
        self.second = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.first) * F.linear(x, self.second)


def with_early_fetches() -> GraphModule:
    gm = symbolic_trace(Fetches())
    for node in [n for n in gm.graph.nodes if n.op == "get_attr"]:
        next(iter(gm.graph.nodes)).prepend(node)
    gm.recompile()
    return gm


def with_constant_call() -> GraphModule:
    gm = symbolic_trace(Fetches())
    output = next(iter(reversed(gm.graph.nodes)))
    with gm.graph.inserting_before(output):
        ones = gm.graph.call_function(torch.ones, (4,))
        output.args = (gm.graph.call_function(torch.add, (output.args[0], ones)),)
    gm.recompile()
    return gm


@pytest.mark.parametrize("trip", TRIPS)
@pytest.mark.parametrize("make", [with_iadd, with_early_fetches, with_constant_call, attention])
def test_undo_after_what_torch_does_to_graphs(make: Callable[[], GraphModule], trip: str) -> None:
    gm = make()
    before = Portrait.of(gm)
    MergeLinears()(gm)
    FuseBiasInLinear()(gm)
    assert refold.history(gm)
    clone = TRIPS[trip](gm)
    found = before.differences(Portrait.of(refold.undo(clone, None)))
    assert found == []
    x = torch.randn(2, 4) if make is not attention else attention_layers.attention()[1][0]
    assert torch.equal(clone(x), refold.undo(gm, None)(x))


def test_a_graph_edited_after_pickling_is_still_seen() -> None:
    gm = with_iadd()
    FuseBiasInLinear()(gm)
    clone = through_pickle(gm)
    output = next(iter(reversed(clone.graph.nodes)))
    with clone.graph.inserting_before(output):
        output.args = (clone.graph.call_function(torch.neg, (output.args[0],)),)
    clone.recompile()
    with pytest.raises(refold.GraphEdited):
        refold.undo(clone)


def test_order_of_state_dict_and_persistence_of_buffers() -> None:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 3)
            self.register_buffer("kept", torch.ones(3))
            self.register_buffer("passing", torch.ones(3), persistent=False)
            self.second = nn.Linear(4, 3)
            self.last = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x) * self.kept + self.second(x) * self.passing)

    gm = symbolic_trace(Buffers())
    keys = list(gm.state_dict())
    MergeLinears()(gm)
    FuseBiasInLinear()(gm)
    for clone in (copy.deepcopy(gm), through_pickle(gm), gm):
        refold.undo(clone, None)
        assert list(clone.state_dict()) == keys


def test_an_earlier_move_stays_when_a_later_change_is_undone() -> None:
    gm = symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    gm.register_parameter("query", nn.Parameter(torch.randn(4)))
    first = next(iter(gm.graph.nodes))
    with gm.graph.inserting_after(first):
        query = gm.graph.get_attr("query")
    gm.recompile()

    def move(graph_module: GraphModule) -> GraphModule:
        next(iter(graph_module.graph.nodes)).prepend(query)
        return graph_module

    def insert(graph_module: GraphModule) -> GraphModule:
        last = next(node for node in graph_module.graph.nodes if node.op == "output")
        with graph_module.graph.inserting_before(last):
            last.args = (graph_module.graph.call_function(torch.add, (last.args[0], query)),)
        return graph_module

    before = Portrait.of(gm)
    FromFunction(move)(gm)
    moved = Portrait.of(gm)
    FromFunction(insert)(gm)
    assert moved.differences(Portrait.of(refold.undo(gm))) == []
    assert before.differences(Portrait.of(refold.undo(gm))) == []


def test_out_of_order_undo_keeps_the_order_of_keys() -> None:
    gm = symbolic_trace(nn.Sequential(layers.Gated(bias=True), attention_layers.Attention()))
    keys, names = list(gm.state_dict()), [n.name for n in gm.graph.nodes]
    ChangeTrueDivToMulByInverse()(gm)
    MergeLinears()(gm)
    ChangeTrueDivToMulByInverse()(gm, reverse=True)
    MergeLinears()(gm, reverse=True)
    assert list(gm.state_dict()) == keys and [n.name for n in gm.graph.nodes] == names


def test_exported_graphs_with_trees() -> None:
    class Trees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 3)
            self.second = nn.Linear(4, 3)

        def forward(self, batch: dict[str, torch.Tensor], *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"a": self.first(batch["x"]) * scale, "b": self.second(batch["x"])}

    args, kwargs = ({"x": torch.randn(2, 4)},), {"scale": torch.tensor(2.0)}
    gm = torch.export.export(Trees(), args, kwargs, strict=False).module()
    before, expected = Portrait.of(gm), gm(*args, **kwargs)
    MergeLinears()(gm)
    assert refold.history(gm)
    torch.testing.assert_close(gm(*args, **kwargs), expected)
    for clone in (copy.deepcopy(gm), gm):
        assert before.differences(Portrait.of(refold.undo(clone))) == []
        torch.testing.assert_close(clone(*args, **kwargs), expected)


def test_node_metadata_comes_back() -> None:
    gm, _ = examples.exported(attention_layers.attention())
    metas = {n.name: dict(n.meta) for n in gm.graph.nodes}
    MergeLinears()(gm)
    refold.undo(gm)
    for node in gm.graph.nodes:
        assert list(node.meta) == list(metas[node.name])
        assert all(node.meta[k] is v for k, v in metas[node.name].items())


def test_new_nodes_get_the_names_they_would_have_got() -> None:
    plain, folded = attention(), attention()
    refold.undo(MergeLinears()(folded))
    names = [gm.graph.call_function(torch.neg, (next(iter(gm.graph.nodes)),)).name for gm in (plain, folded)]
    names += [gm.graph.call_module("query", (next(iter(gm.graph.nodes)),)).name for gm in (plain, folded)]
    assert names[0] == names[1] and names[2] == names[3]


def test_ties_come_back() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            return self.head(self.first(x) + self.second(x))

    gm = symbolic_trace(Tied())
    MergeLinears()(gm)
    for clone in (copy.deepcopy(gm), through_pickle(gm), gm):
        refold.undo(clone)
        assert clone.head.weight is clone.embed.weight


def test_mode_toggled_while_folded() -> None:
    gm = attention()
    MergeLinears()(gm)
    gm.eval()
    refold.undo(gm)
    assert not any(m.training for m in gm.modules())


def test_loaded_weights_are_carried_back() -> None:
    gm = attention()
    MergeLinears()(gm)
    other = {k: torch.randn_like(v) for k, v in gm.state_dict().items()}
    gm.load_state_dict(other)
    x = torch.randn(2, 3, 6)
    expected = gm(x)
    refold.undo(gm)
    torch.testing.assert_close(gm(x), expected)
    assert torch.equal(gm.query.weight, other["query_key_value_merged.weight"][:6])


class CleansUp(refold.Transformation):
    """Ends as passes for torch.fx do; that takes out every child that no node calls."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.nodes:
            if node.target == "relu":
                graph_module.add_submodule("gelu", nn.GELU())
                node.target = "gelu"
        graph_module.delete_all_unused_submodules()
        return graph_module


class InBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "unused": nn.Linear(3, 3)})
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.block["a"](x)) + self.block["b"](x)


@pytest.mark.parametrize("together", [True, False], ids=["composed", "one by one"])
def test_a_pass_that_takes_out_unused_modules_keeps_the_history(together: bool) -> None:
    gm = symbolic_trace(InBlocks())
    before, state = Portrait.of(gm), {key: value.clone() for key, value in gm.state_dict().items()}
    for t in [refold.compose(MergeLinears(), CleansUp())] if together else [MergeLinears(), CleansUp()]:
        t(gm)
    assert [change.name for change in refold.history(gm)] == ["MergeLinears", "CleansUp"]
    given = refold.original_state_dict(gm)
    assert list(given) == list(state) and all(torch.equal(given[key], value) for key, value in state.items())
    CleansUp()(gm)
    assert len(refold.history(gm)) == 2, "a call that changes nothing keeps it as well"
    refold.undo(gm, None)
    assert before.differences(Portrait.of(gm)) == []


def test_a_pass_that_takes_out_what_an_earlier_change_made() -> None:
    class DropsMerged(refold.Transformation):
        def transform(self, graph_module: GraphModule) -> GraphModule:
            relu = next(n for n in graph_module.graph.nodes if n.target == "relu")
            relu.args = (next(n for n in graph_module.graph.nodes if n.op == "placeholder"),)
            output = next(n for n in graph_module.graph.nodes if n.op == "output")
            output.args = (relu,)
            graph_module.graph.eliminate_dead_code()
            graph_module.delete_all_unused_submodules()
            return graph_module

    gm = symbolic_trace(InBlocks())
    before = Portrait.of(gm)
    MergeLinears()(gm)
    DropsMerged()(gm)
    assert len(refold.history(gm)) == 2 and not [*gm.parameters()]
    with pytest.raises(refold.OutOfOrder, match="DropsMerged"):
        MergeLinears()(gm, reverse=True)
    refold.undo(gm, None)
    assert before.differences(Portrait.of(gm)) == []


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)
        self.value, self.last = self.key, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.query(x) + self.key(x) + self.value(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda gm: pickle.loads(pickle.dumps(gm))])
def test_a_second_name_that_the_graph_no_longer_reads_survives_a_copy(copied: Any) -> None:
    x = torch.randn(2, 4)
    gm = refold.trace(TwoNames(), x)
    names, expected = list(gm.state_dict()), gm(x)
    refold.EliminateCommonSubexpressions()(gm)
    assert len(refold.history(gm)) == 1 and not any(node.target == "value" for node in gm.graph.nodes)
    clone = copied(gm)
    assert list(refold.original_state_dict(clone)) == names
    refold.undo(clone)
    assert clone.value is clone.key and list(clone.state_dict()) == names
    assert torch.equal(clone(x), expected)
