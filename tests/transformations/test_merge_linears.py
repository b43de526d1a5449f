"""MergeLinears: every way it was wrong elsewhere."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from checking import reasons, rewritten, targets
from torch import nn
from torch.fx import symbolic_trace
from torch.nn.utils import prune

import refold
from refold import MergeLinears
from refold.examples import exported, layers
from refold.examples.attention_layers import Attention, attention
from refold.testing import LAWS, check_law


class Pair(nn.Module):
    """Two linears on one input, which `forward` of subclasses combine."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.first(x), self.second(x)], -1)


def linears(gm: nn.Module) -> int:
    return sum(isinstance(m, nn.Linear) for m in gm.modules())


def test_at_the_root() -> None:
    gm = rewritten(MergeLinears(), Pair(nn.Linear(4, 3), nn.Linear(4, 3)), torch.randn(2, 4), sites=1)
    assert linears(gm) == 1 and targets(gm)[1] == "first_second_merged"


def test_without_any_bias() -> None:
    gm = rewritten(MergeLinears(), Pair(nn.Linear(4, 3, bias=False), nn.Linear(4, 5, bias=False)), torch.randn(2, 4))
    assert gm.first_second_merged.bias is None


@pytest.mark.parametrize("first_biased", [True, False])
def test_bias_on_some_only(first_biased: bool) -> None:
    model = Pair(nn.Linear(4, 3, bias=first_biased), nn.Linear(4, 5, bias=not first_biased))
    gm = rewritten(MergeLinears(), model, torch.randn(2, 4), sites=1)
    assert [tuple(p.shape) for p in gm.parameters()] == [(8, 4), (3 if first_biased else 5,)]
    back = refold.undo(gm)
    assert (back.first.bias is None) != first_biased and (back.second.bias is None) == first_biased


def test_a_layer_without_a_bias_gains_none_by_training() -> None:
    gm = symbolic_trace(Pair(nn.Linear(4, 3), nn.Linear(4, 5, bias=False)))
    MergeLinears()(gm)
    optimizer = torch.optim.SGD(gm.parameters(), lr=0.1)
    gm(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    x = torch.randn(2, 4, dtype=torch.float64)
    trained = gm.double()(x)
    MergeLinears()(gm, reverse=True)
    assert gm.second.bias is None
    torch.testing.assert_close(gm(x), trained, rtol=torch.finfo(torch.float64).eps * 8, atol=1e-15)


def test_unequal_widths_and_many_layers() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, i) for i in (1, 7, 2, 5, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([layer(x) for layer in self.layers], -1)

    gm = rewritten(MergeLinears(), Many(), torch.randn(2, 2, 3), sites=1)
    assert [m.out_features for m in gm.modules() if isinstance(m, nn.Linear)] == [16]


def test_module_called_twice_is_left_alone() -> None:
    class Twice(Pair):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(self.first(x)) + self.second(x)

    text = reasons(MergeLinears(), Twice(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4))
    assert "called more than once" in text


def test_weight_tied_to_an_embedding_is_left_alone() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.other = nn.Linear(4, 3)
            self.another = nn.Linear(4, 2)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x = self.embed(ids)
            return self.head(x), self.other(x), self.another(x)

    model = Tied()
    gm = rewritten(MergeLinears(), model, torch.tensor([[0, 3]]), sites=1)
    assert "embed.weight" in str(refold.result(gm))
    assert gm.head.weight is gm.embed.weight


def test_two_tied_linears_are_left_alone() -> None:
    model = Pair(nn.Linear(4, 3), nn.Linear(4, 3))
    model.second.weight = model.first.weight
    assert "also registered as" in reasons(MergeLinears(), model, torch.randn(2, 4))


def test_weights_that_share_memory_under_two_parameters_are_left_alone() -> None:
    class Reads(Pair):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) + self.second(x) + (x.sum() * self.rows).sum()

    model: Pair = Reads(nn.Linear(4, 3), nn.Linear(4, 3))
    model.register_buffer("rows", model.first.weight.data[1:])
    gm = symbolic_trace(model)  # a copy would tear them apart
    MergeLinears()(gm)
    assert "its weight shares memory with rows" in str(refold.result(gm)) and not refold.history(gm)
    whole = torch.randn(6, 4)
    model = Pair(nn.Linear(4, 3), nn.Linear(4, 3))
    for i, layer in enumerate((model.first, model.second)):  # parts of one storage that do not overlap
        layer.weight = nn.Parameter(whole[3 * i : 3 * i + 3])
    gm = symbolic_trace(model)
    MergeLinears()(gm)
    assert len(refold.result(gm).rewritten) == 1


def test_a_transposed_weight_is_left_alone() -> None:
    model = Pair(nn.Linear(4, 3), nn.Linear(4, 3))
    model.first.weight = nn.Parameter(torch.randn(4, 3).t())
    assert "does not lie row by row" in reasons(MergeLinears(), model, torch.randn(2, 4))


def test_weight_read_directly_elsewhere_is_left_alone() -> None:
    class Reads(Pair):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) + self.second(x) + self.first.weight.sum()

    text = reasons(MergeLinears(), Reads(nn.Linear(4, 3), nn.Linear(4, 3)), torch.randn(2, 4))
    assert "also read by first_weight" in text


def test_frozen_next_to_trainable_are_not_mixed() -> None:
    class Four(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(4, i) for i in (1, 2, 3, 4))
            self.b.requires_grad_(False)
            self.d.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.a(x), self.b(x), self.c(x), self.d(x)], -1)

    gm = rewritten(MergeLinears(), Four(), torch.randn(2, 4), sites=2)
    assert {n: p.requires_grad for n, p in gm.named_parameters()} == {
        "a_c_merged.weight": True,
        "a_c_merged.bias": True,
        "b_d_merged.weight": False,
        "b_d_merged.bias": False,
    }


def test_frozen_bias_only() -> None:
    model = Pair(nn.Linear(4, 3), nn.Linear(4, 3))
    for layer in (model.first, model.second):
        layer.bias.requires_grad_(False)
    gm = rewritten(MergeLinears(), model, torch.randn(2, 4), sites=1)
    assert [p.requires_grad for p in gm.parameters()] == [True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    gm = rewritten(MergeLinears(), Attention().to(dtype), torch.randn(2, 3, 6, dtype=dtype), sites=1)
    assert {p.dtype for p in gm.parameters()} == {dtype}


def test_dtypes_are_not_mixed() -> None:
    model = Pair(nn.Linear(4, 3), nn.Linear(4, 3).double())
    gm = symbolic_trace(model)
    MergeLinears()(gm)
    assert "differ in dtype" in str(refold.result(gm)) and not refold.history(gm)


def test_keyword_calls() -> None:
    class Keyword(Pair):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(input=x) + self.second(x)

    rewritten(MergeLinears(), Keyword(nn.Linear(4, 3), nn.Linear(4, 3)), torch.randn(2, 4), sites=1)


def test_write_to_the_input_between() -> None:
    class Writes(Pair):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1
            a = self.first(x)
            x.add_(1)
            return a + self.second(x)

    text = reasons(MergeLinears(), Writes(nn.Linear(4, 3), nn.Linear(4, 3)), torch.randn(2, 4))
    assert "add_ writes into its input" in text


def test_write_through_a_view_of_the_input_between() -> None:
    class Writes(Pair):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1
            view = x.view(-1)
            a = self.first(x)
            view.add_(1)
            return a + self.second(x)

    assert "writes into its input" in reasons(
        MergeLinears(), Writes(nn.Linear(4, 3), nn.Linear(4, 3)), torch.randn(2, 4)
    )


def test_slice_consumed_by_an_in_place_operation() -> None:
    class Writes(Pair):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.first(x), self.second(x)
            a.mul_(3)
            return a * b

    text = reasons(MergeLinears(), Writes(nn.Linear(4, 3), nn.Linear(4, 3)), torch.randn(2, 4))
    assert "writes into its output in place" in text


@pytest.mark.parametrize("act", [nn.ReLU(inplace=True), nn.SiLU(inplace=True)])
def test_slice_consumed_by_an_in_place_module(act: nn.Module) -> None:
    class Acts(Pair):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 3), nn.Linear(4, 3))
            self.act = act

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self.first(x)) * self.second(x)

    assert "writes into its output in place" in reasons(MergeLinears(), Acts(), torch.randn(2, 4))


def test_slice_consumed_by_view() -> None:
    class Views(Pair):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = self.first(x), self.second(x)
            return a.view(-1) @ b.transpose(0, 1).reshape(-1) + a.view(2, -1, 2).sum()

    gm = rewritten(MergeLinears(), Views(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4), sites=1)
    assert "view" not in targets(gm)


def test_what_leaves_the_graph_is_contiguous() -> None:
    class Leaves(Pair):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.first(x), self.second(x)

    gm = rewritten(MergeLinears(), Leaves(nn.Linear(4, 3), nn.Linear(4, 5)), torch.randn(2, 4), sites=1)
    assert all(y.is_contiguous() for y in gm(torch.randn(2, 4)))


def test_nested_at_different_depths() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.top = nn.Linear(4, 3)
            self.inner = nn.ModuleDict({"one": nn.ModuleDict({"two": nn.Linear(4, 5)}), "three": nn.Linear(4, 2)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.inner["one"]["two"](x), self.top(x), self.inner["three"](x)], -1)

    rewritten(MergeLinears(), Deep(), torch.randn(2, 4), sites=1)


def test_subclasses_hooks_and_parametrizations_are_left_alone() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    class Leafy(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, qualified_name: str) -> bool:
            return isinstance(m, nn.Linear) or super().is_leaf_module(m, qualified_name)

    def graph(model: nn.Module) -> torch.fx.GraphModule:
        return torch.fx.GraphModule(model, Leafy().trace(model))

    text = reasons(MergeLinears(), graph(Pair(Scaled(4, 3), nn.Linear(4, 3))), torch.randn(2, 4))
    assert "it is a Scaled, a subclass" in text
    hooked = Pair(nn.Linear(4, 3), nn.Linear(4, 3))
    hooked.first.register_forward_hook(lambda module, args, output: output * 2)
    assert "hooks are registered" in reasons(MergeLinears(), graph(hooked), torch.randn(2, 4))
    normed = Pair(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Linear(4, 3))
    assert "subclass" in reasons(MergeLinears(), graph(normed), torch.randn(2, 4))
    pruned = Pair(nn.Linear(4, 3), nn.Linear(4, 3))
    prune.random_unstructured(pruned.first, "weight", 0.5)
    assert "hooks are registered" in reasons(MergeLinears(), graph(pruned), torch.randn(2, 4))


def test_different_training_modes_are_not_mixed() -> None:
    model = Pair(nn.Linear(4, 3), nn.Linear(4, 3))
    model.first.eval()
    assert "training mode" in reasons(MergeLinears(), model, torch.randn(2, 4))


@pytest.mark.parametrize("how", ["function", "aten"])
def test_functions_and_aten_operators(how: str) -> None:
    class Functions(Pair):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.first.weight, self.first.bias) * F.linear(x, self.second.weight, bias=None)

    model, x = Functions(nn.Linear(4, 3), nn.Linear(4, 3, bias=False)), torch.randn(2, 4)
    if how == "aten":
        model, _ = exported((model, (x,)))
    gm = rewritten(MergeLinears(), model, x, sites=1)
    called = [n.target for n in gm.graph.nodes]
    assert called.count(F.linear) + called.count(torch.ops.aten.linear.default) == 1


def test_gradients_can_flow_between_modes_only_as_before() -> None:
    class Half(Pair):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = self.first(x)
            with torch.no_grad():
                b = self.second(x)
            return a * b

    model, x = Half(nn.Linear(4, 3), nn.Linear(4, 3)), torch.randn(2, 4)
    gm, _ = exported((model, (x,)))
    MergeLinears()(gm)
    gm(x).sum().backward()
    assert all(p.grad is None for n, p in gm.named_parameters() if n.startswith("second"))


def test_the_originals_share_the_merged_memory_and_come_back_with_their_own() -> None:
    eager = Pair(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    gm = symbolic_trace(eager)
    MergeLinears()(gm)
    merged = gm.first_second_merged.weight
    assert eager.first.weight.untyped_storage().data_ptr() == merged.untyped_storage().data_ptr()
    assert eager.second.weight.untyped_storage().data_ptr() == merged.untyped_storage().data_ptr()
    assert refold.history(gm).nbytes == 0
    del merged
    MergeLinears()(gm, reverse=True)
    assert gm.first.weight is eager.first.weight
    assert eager.first.weight.untyped_storage().nbytes() == 64 * 64 * 4


@pytest.mark.parametrize("cast", [torch.float16, torch.float64])
def test_cast_while_merged(cast: torch.dtype) -> None:
    gm = symbolic_trace(Pair(nn.Linear(4, 3), nn.Linear(4, 3, bias=False)))
    expected = copy.deepcopy(gm).to(cast)
    MergeLinears()(gm)
    gm.to(cast)
    MergeLinears()(gm, reverse=True)
    for (name, a), (other, b) in zip(expected.named_parameters(), gm.named_parameters(), strict=True):
        assert name == other and a.dtype == b.dtype and torch.equal(a, b)


def test_optimizer_of_the_original_parameters_keeps_working_after_reverse() -> None:
    gm = symbolic_trace(Pair(nn.Linear(4, 3), nn.Linear(4, 3)))
    optimizer = torch.optim.SGD(gm.parameters(), lr=0.1)
    MergeLinears()(gm)
    MergeLinears()(gm, reverse=True)
    before = [p.clone() for p in gm.parameters()]
    gm(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, gm.parameters(), strict=True))


class LearnedQueries(nn.Module):
    """Two linear layers on a parameter, called as functions, so that their input is fetched as their weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(2, 4))
        self.first, self.second = (nn.Parameter(torch.randn(3, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.linear(self.queries, self.first) * F.linear(self.queries, self.second)


@pytest.mark.parametrize("export", [False, True])
def test_an_input_that_is_fetched_stays(export: bool) -> None:
    model, inputs = LearnedQueries(), (torch.randn(2, 3),)
    gm = rewritten(MergeLinears(), exported((model, inputs))[0] if export else model, *inputs, sites=1)
    assert "queries" in [node.target for node in gm.graph.nodes if node.op == "get_attr"]


def test_slices_are_marked() -> None:
    gm = symbolic_trace(Pair(nn.Linear(4, 3), nn.Linear(4, 3)))
    t = MergeLinears()
    t(gm)
    marked = [n.target for n in t.get_transformed_nodes(gm)]
    assert marked == ["first_second_merged", operator.getitem, operator.getitem]


@pytest.mark.parametrize("law", ["L2", "L3", "L5", "L7", "L12", "L13"])
@pytest.mark.parametrize("how", ["modules", "aten", "with and without a bias"])
def test_blocks_for_ranks_keep_the_laws(how: str, law: str) -> None:
    examples = {"modules": layers.gated, "aten": lambda: exported(layers.gated()), "with and without a bias": attention}
    model, inputs = examples[how]()
    check_law(LAWS[law], MergeLinears(shards=3), model, inputs)


def test_columns_in_blocks() -> None:
    class Columns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(4, 6))
            self.bias, self.other = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([torch.addmm(self.bias, x, self.first), torch.addmm(self.other, x, self.second)], -1)

    gm = rewritten(MergeLinears(shards=2), Columns(), torch.randn(3, 4), sites=1)
    refold.undo(gm)


def test_a_rank_gets_its_own_rows_of_every_layer() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 8)
    gm = MergeLinears(shards=2)(symbolic_trace(Pair(first, second)))
    whole = gm.first_second_merged
    for rank in range(2):
        rows = slice(rank * 2, rank * 2 + 2), slice(rank * 4, rank * 4 + 4)
        for name in ("weight", "bias"):
            own = [getattr(layer, name)[part] for layer, part in zip((first, second), rows, strict=True)]
            assert torch.equal(getattr(whole, name)[rank * 6 : rank * 6 + 6], torch.cat(own))


def test_rows_that_cannot_be_divided_and_bad_settings() -> None:
    model, inputs = layers.gated()
    assert "its 9 outputs cannot be divided evenly among 2 ranks" in reasons(MergeLinears(shards=2), model, *inputs)
    for shards in (0, -1, 2.0, True, "2"):
        with pytest.raises(ValueError, match="shards must be a number of ranks"):
            MergeLinears(shards=shards)  # type: ignore[arg-type]


def test_a_setting_that_came_later_changes_no_signature() -> None:
    assert repr(MergeLinears(shards=1)) == "MergeLinears()"
    assert MergeLinears(shards=1).signature == MergeLinears().signature != MergeLinears(shards=2).signature
