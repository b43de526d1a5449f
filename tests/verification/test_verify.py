"""`verify` never blames a right rewrite and never lets a planted defect pass; everything else it meets, it says."""

from __future__ import annotations

import copy
import json
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, symbolic_trace
from verify_models import ALL, DEFECTS, DTYPES, MODELS, ConvNet, Dead, Divide, ForeignFold, MappedFold, Merge, build

import refold
import refold.transformations
from refold.optimization.report_building import summary_of
from refold.record.stack import history
from refold.rewrite.registry import registered
from refold.rewrite.rule import Rewrite
from refold.rewrite.transformation import Transformation
from refold.testing.laws import graph_of
from refold.verification.accuracy import OutputReference
from refold.verification.verdicts import Verification
from refold.verification.verifier import verify, verify_last

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _names(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- both error rates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=_names)
@pytest.mark.parametrize("family", MODELS)
def test_no_alarm_on_right_rewrites(family: str, dtype: torch.dtype):
    for seed in range(2):
        gm, x = build(family, dtype, seed)
        refold.compose(*ALL)(gm)
        assert len(history(gm)) >= 3
        found = verify(gm, x, seed=seed)
        assert found.right, f"seed {seed}: {found}"
        assert len(found.sites) >= 3 and found.grade in ("bit-identical", "same error class"), str(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=_names)
def test_no_alarm_on_right_folds_of_somebody_else(dtype: torch.dtype):
    for make in (ForeignFold, MappedFold, Divide):
        gm, x = build("conv", dtype, 1)
        rewrite = make()
        rewrite(gm)
        for known in ([], [rewrite]):
            found = verify(gm, x, transformations=known)
            assert found.right and found.sites, str(found)
    gm, x = build("attention", dtype, 1)
    assert verify(Merge()(gm), x).right


@pytest.mark.parametrize("dtype", DTYPES, ids=_names)
@pytest.mark.parametrize(("name", "family", "make"), DEFECTS, ids=[d[0] for d in DEFECTS])
def test_every_planted_defect_is_caught(name: str, family: str, make, dtype: torch.dtype):
    for seed in range(2):
        gm, x = build(family, dtype, seed)
        if "bias not scaled" in name and gm.conv.bias is None:
            gm.conv.bias = nn.Parameter(torch.randn(6).to(dtype))
        rewrite = make()
        rewrite(gm)
        assert len(history(gm)) == 1
        found = verify(gm, x, transformations=[rewrite], seed=seed)
        assert not found.right and not found, f"{name}, seed {seed}: {found}"
        assert found.grade == "wrong" and "wrong" in found.sentence.lower()


@pytest.mark.parametrize("model_class", [ConvNet, Dead])
def test_a_dead_relu_hides_nothing(model_class: type[ConvNet]):
    torch.manual_seed(0)
    model = model_class(torch.Generator().manual_seed(0), 0.1).eval()
    model.norm.bias.data.fill_(-1e4 if model_class is ConvNet else 1.0)
    gm, x = symbolic_trace(model), torch.randn(2, 3, 6, 6)
    expected = model(x)
    rewrite = ForeignFold("scale off by 0.1 %")
    rewrite(gm)
    assert torch.equal(gm(x), expected)  # end to end nothing is to be seen
    assert not verify(gm, x, transformations=[rewrite]).right


def test_weights_that_are_not_what_their_map_says_are_caught_with_the_original():
    gm, x = build("conv", torch.float32, 0)
    original = copy.deepcopy(gm)
    MappedFold(stale=True)(gm)
    found = verify(gm, x, original=original)
    assert not found.right and "conv.weight" in found.sentence


def test_merged_weights_overwritten_by_others_are_carried_back_and_right():
    gm, x = build("attention", torch.float32, 0)
    refold.MergeLinears()(gm)
    with torch.no_grad():
        for parameter in gm.parameters():
            parameter.add_(0.1)
    assert verify(gm, x).right


def test_weights_trained_while_folded_are_right_up_to_the_rounding_of_carrying_them_back():
    for dtype in DTYPES:
        gm, x = build("conv", dtype, 3)
        refold.FuseBatchNorm2dInConv2d()(gm)
        with torch.no_grad():
            gm.conv.weight.mul_(1.25).add_(0.01)
        assert verify(gm, x).right


@pytest.mark.parametrize("dtype", DTYPES, ids=_names)
def test_a_map_that_reads_what_another_one_of_the_same_change_made(dtype: torch.dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)).eval()
    for norm in model[1:]:
        norm.running_var.uniform_(0.5, 2)
        norm.running_mean.normal_()
    gm, x = symbolic_trace(model.to(dtype)), torch.randn(1, 3, 5, 5).to(dtype)
    refold.FoldBatchNorm()(gm)
    assert len(history(gm)[0].maps) == 2 and verify(gm, x).right
    with torch.no_grad():
        getattr(gm, "0").weight.add_(0.1)
    assert verify(gm, x).right, "trained since, so carried back and rounded"
    broken = copy.deepcopy(gm)
    record = history(broken)[0].maps[0]
    record.kept["gamma"] = record.kept["gamma"] * 1.5
    assert not verify(broken, x, original=refold.undo(gm)).right


@pytest.mark.parametrize("dtype", DTYPES, ids=_names)
def test_a_fold_that_is_rounded_away_is_right(dtype: torch.dtype):
    """A fresh batch norm scales by 1 / sqrt(1 + 1e-5): in bfloat16 the folded weights are the old ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval().to(dtype)
    gm, x = symbolic_trace(model), torch.randn(1, 3, 5, 5).to(dtype)
    refold.FoldBatchNorm()(gm)
    assert history(gm) and verify(gm, x).right


def test_a_fold_that_overflows_is_wrong():
    gm, x = build("conv", torch.float16, 0)
    gm.norm.running_var = torch.full((6,), 1e-7).half()
    gm.norm.eps = 0.0
    gm.norm.weight.data.fill_(30000.0)
    refold.FuseBatchNorm2dInConv2d()(gm)
    assert not history(gm), "it is refused"
    MappedFold()(gm)
    found = verify(gm, x)
    assert not found.right and "overflow" in found.sentence


# --- what graphs hold -------------------------------------------------------------------------------------------------


class Applied(Transformation):
    """A transformation made of a function."""

    def __init__(self, edit) -> None:
        self.edit = edit

    @property
    def signature(self) -> int:
        return hash(self.edit.__name__)

    def transform(self, graph_module: GraphModule) -> GraphModule:
        self.edit(graph_module)
        return graph_module


def _apply(model: nn.Module, edit) -> GraphModule:
    gm = symbolic_trace(model)
    Applied(edit)(gm)
    assert history(gm)
    return gm


def _node(gm: GraphModule, target) -> torch.fx.Node:
    return next(n for n in gm.graph.nodes if n.target == target)


class Twice(nn.Module):
    def forward(self, x):
        return torch.exp(x).sum(-1) + torch.exp(x).mean(-1)


def test_values_that_one_side_shares_are_recomputed_inside():
    def share(gm):
        first, second = [n for n in gm.graph.nodes if n.target is torch.exp]
        second.replace_all_uses_with(first)
        gm.graph.erase_node(second)

    assert verify(_apply(Twice(), share), torch.randn(2, 3)).grade == "bit-identical"


def test_values_that_pass_through_a_reshape_inside_the_site():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)

        def forward(self, x):
            y = self.conv(x)
            return torch.relu(self.norm(y.flatten(0, 1)).reshape_as(y))

    def fold(factor):
        def edit(gm):
            norm = gm.norm
            scale = norm.weight / torch.sqrt(norm.running_var + norm.eps) * factor
            twin = nn.Linear(4, 6)
            twin.weight = nn.Parameter((gm.conv.weight * scale[:, None]).detach())
            twin.bias = nn.Parameter((scale * (gm.conv.bias - norm.running_mean) + norm.bias).detach())
            gm.conv = twin
            node = _node(gm, "norm")
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)

        return edit

    torch.manual_seed(0)
    assert verify(_apply(Flat().eval(), fold(1)), torch.randn(2, 3, 4)).right
    assert not verify(_apply(Flat().eval(), fold(1.001)), torch.randn(2, 3, 4)).right


def test_nodes_that_change_places_are_judged_together():
    class Pooled(nn.Module):
        def forward(self, x):
            return torch.neg(F.max_pool2d(torch.relu(x), 2))

    def swap(gm):
        relu, pool, neg = [n for n in gm.graph.nodes if n.op == "call_function"]
        pool.args = (relu.args[0], *pool.args[1:])
        pool.append(relu)
        relu.args, neg.args = (pool,), (relu,)

    assert verify(_apply(Pooled(), swap), torch.randn(1, 2, 4, 4)).right


class TwoRelus(nn.Module):
    def forward(self, x):
        return torch.relu(torch.relu(x)) * 2


def test_a_rewrite_that_rests_on_what_its_input_can_be_is_right():
    def drop(gm):
        second = [n for n in gm.graph.nodes if n.target is torch.relu][1]
        second.replace_all_uses_with(second.args[0])
        gm.graph.erase_node(second)

    assert verify(_apply(TwoRelus(), drop), torch.randn(3, 4)).right


def test_a_rewrite_that_rests_on_the_example_is_wrong():
    class One(nn.Module):
        def forward(self, x):
            return torch.relu(x) * 2

    def drop(gm):
        node = _node(gm, torch.relu)
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)

    found = verify(_apply(One(), drop), torch.rand(3, 4))
    assert not found.right and all(o.grade == "bit-identical" for o in found.outputs)


class InPlace(nn.Module):
    def forward(self, x):
        y = x * 2
        y.add_(1)
        return y.mul(3), y


def test_in_place_writes_are_compared():
    def other(gm):
        _node(gm, "add_").args = (_node(gm, operator.mul), 1.5)

    def same(gm):
        _node(gm, "mul").args = (_node(gm, operator.mul), 3.0)

    assert not verify(_apply(InPlace(), other), torch.randn(3)).right
    assert verify(_apply(InPlace(), same), torch.randn(3)).right


class FilledInParts(nn.Module):
    """A value that is made empty and filled through views, as keys are of which a part is turned."""

    def __init__(self, second):
        super().__init__()
        self.second = second

    def forward(self, x):
        key = x.new_full((2, 6), -1.0)
        key[..., :2] = x[..., :2].exp()
        key[..., 2:] = self.second(x)
        return key.relu() * 2


@pytest.mark.parametrize(("second", "right"), [(torch.exp, True), (torch.sin, False)])
def test_what_fills_a_value_through_views_is_part_of_the_site(second, right):
    """A relu may become an absolute value where all that fills its input is positive; how it was made says nothing."""

    def replace(gm):
        _node(gm, aten.relu.default).target = aten.abs.default

    gm = refold.trace(FilledInParts(second), torch.randn(2, 4), dynamic=False)
    Applied(replace)(gm)
    found = verify(gm, torch.rand(2, 4))
    assert found.right == right, found


def test_a_cast_that_is_none_may_be_dropped_before_a_write():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.segment = nn.Parameter(torch.randn(9, 4)), nn.Parameter(torch.randn(1, 4))

        def forward(self, x):
            found = self.table.index_select(0, x).detach().to(torch.float32)
            return found.add_(self.segment.to(torch.float32)).relu()

    x = torch.arange(5)
    gm = refold.RemoveNoOps()(refold.trace(Positions(), x, dynamic=False))
    assert len(refold.result(gm).rewritten) == 2
    found = verify(gm, x)
    assert found.right, found

    def other(gm):
        _node(gm, aten.add_.Tensor).kwargs = {"alpha": 1.001}

    gm = refold.trace(Positions(), x, dynamic=False)
    Applied(other)(gm)
    assert not verify(gm, x).right


def test_moving_a_read_across_a_write_is_wrong():
    class Read(nn.Module):
        def forward(self, x):
            y = x * 1
            before = y + 0
            y.add_(1)
            return before + y

    def move(gm):
        _node(gm, "add_").append(_node(gm, operator.add))

    assert not verify(_apply(Read(), move), torch.randn(3)).right


def test_dropping_a_copy_that_a_write_needed_is_wrong():
    class Copied(nn.Module):
        def forward(self, x):
            y = x * 2
            kept = y.clone()
            y.add_(1)
            return kept - 3, y

    def drop(gm):
        node = _node(gm, "clone")
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)

    assert not verify(_apply(Copied(), drop), torch.randn(3)).right


def test_integers_masks_and_nothing_are_compared_exactly():
    class Ints(nn.Module):
        def forward(self, x, ids=None, scale=2):
            return {"ids": ids + 1, "mask": x > 0.1, "none": None, "size": x.size(0), "y": (x * scale, [x])}

    def other(gm):
        _node(gm, operator.add).args = (_node(gm, "ids"), 2)

    def threshold(gm):
        _node(gm, operator.gt).args = (_node(gm, "x"), 0.1000001)

    inputs = {"x": torch.randn(4, 5), "ids": torch.arange(4)}
    assert not verify(_apply(Ints(), other), inputs).right
    assert verify(_apply(Ints(), _retype), inputs).right
    gm = _apply(Ints(), threshold)
    assert verify(gm, {"x": torch.tensor([[0.10000005]]), "ids": torch.arange(1)}).right is False  # a mask that differs


def _retype(gm: GraphModule) -> None:
    _node(gm, operator.mul).target = torch.mul


def test_random_numbers_are_drawn_alike():
    class Drop(nn.Module):
        def forward(self, x):
            return F.dropout(x * 2, 0.5, True) / 8

    gm = symbolic_trace(Drop().train())
    refold.ChangeTrueDivToMulByInverse()(gm)
    x, state = torch.randn(4, 4), torch.get_rng_state()
    assert verify(gm, x).grade == "bit-identical"
    assert torch.equal(state, torch.get_rng_state())


def test_another_shape_dtype_or_structure_is_wrong():
    class Plain(nn.Module):
        def forward(self, x):
            return torch.relu(x)

    def cast(gm):
        with gm.graph.inserting_before(_node(gm, "output")):
            wide = gm.graph.call_method("double", (_node(gm, torch.relu),))
        _node(gm, "output").args = (wide,)

    def flatten(gm):
        _node(gm, torch.relu).target = torch.flatten

    def wrap(gm):
        _node(gm, "output").args = ((_node(gm, torch.relu),),)

    assert "float64" in verify(_apply(Plain(), cast), torch.randn(2, 3)).sentence
    assert "shape" in verify(_apply(Plain(), flatten), torch.randn(2, 3)).sentence
    assert "structure" in verify(_apply(Plain(), wrap), torch.randn(2, 3)).sentence


# --- blame ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rewritten", [False, True])
def test_on_inputs_that_the_original_cannot_take_nothing_is_called_right(rewritten):
    gm, x = build("mlp", torch.float32, 0)
    if rewritten:
        refold.FuseBatchNorm1dInLinear()(gm)
    for inputs in (torch.randn(4, 9), [x, torch.randn(4, 9)], "x"):
        found = verify(gm, inputs)
        assert not found.right and "original itself fails" in found.sentence
    assert verify(gm, x).right


def test_a_given_original_that_is_another_model_is_told():
    gm, x = build("mlp", torch.float32, 0)
    original = copy.deepcopy(gm)
    refold.FuseBatchNorm1dInLinear()(gm)
    assert verify(gm, x, original=original).right
    assert "another model" in verify(gm, x, original=nn.Linear(2, 2)).sentence


def test_a_rewrite_that_raises_where_the_original_does_not_is_wrong():
    def broken(gm):
        _node(gm, operator.truediv).args = (_node(gm, operator.truediv).args[0], torch.ones(17))

    gm, x = build("mlp", torch.float32, 0)
    Applied(broken)(gm)
    found = verify(gm, x)
    assert not found.right and "raises" in str(found)


def test_nothing_rewritten_is_right_and_bit_identical():
    gm, x = build("mlp", torch.float32, 0)
    found = verify(gm, x)
    assert found.right and found.grade == "bit-identical" and not found.sites


def test_nothing_is_touched():
    gm, x = build("attention", torch.float32, 0)
    refold.MergeLinears()(gm)
    places = {name: p.data_ptr() for name, p in gm.named_parameters()}
    bits = {name: p.clone() for name, p in gm.named_parameters()}
    objects, past, code = dict(gm.named_parameters()), history(gm), gm.code
    given = x.clone()
    verify(gm, x)
    assert history(gm) is past and gm.code == code and torch.equal(x, given)
    for name, parameter in gm.named_parameters():
        assert parameter is objects[name] and parameter.data_ptr() == places[name]
        assert torch.equal(parameter, bits[name])


def test_the_eager_model_keeps_sharing_its_memory_with_the_merged_one():
    torch.manual_seed(0)
    model = MODELS["attention"][0](torch.Generator()).eval()
    gm = symbolic_trace(model)
    refold.MergeLinears()(gm)
    before = model.q.weight.untyped_storage().data_ptr()
    verify(gm, torch.randn(2, 5, 8))
    assert model.q.weight.untyped_storage().data_ptr() == before


# --- accuracy and form ------------------------------------------------------------------------------------------------


def test_the_latest_changes_alone():
    gm, x = build("conv", torch.float32, 0)
    ForeignFold("no shift")(gm)
    before = copy.deepcopy(gm)
    refold.ChangeTrueDivToMulByInverse()(gm)
    assert verify_last(gm, x).right and verify_last(gm, x, before=before).right
    assert not verify_last(gm, x, 2).right


def test_outputs_are_graded_by_what_rounding_does_to_the_original():
    gm, x = build("mlp", torch.float32, 0)
    reference = OutputReference.of(gm, x)
    y = gm(x).detach()
    assert reference.grade(y).grade == "bit-identical"
    assert reference.grade(y * (1 + torch.finfo(y.dtype).eps)).grade == "same error class"
    worse = reference.grade(y * 1.001)
    assert worse.grade == "worse" and not worse.acceptable and "rounding" in worse.outputs[0].sentence
    broken = y.clone()
    broken[0, 0] = torch.nan
    assert reference.grade(broken).grade == "worse"
    assert reference.grade((y, y)).grade == "worse"


def test_it_can_be_read():
    gm, x = build("conv", torch.float32, 0)
    refold.compose(*ALL)(gm)
    found = verify(gm, x)
    assert isinstance(found, Verification) and bool(found)
    text = json.dumps(found.to_dict())
    assert '"right": true' in text and found.sites[0].site in str(found)
    assert found._repr_html_().startswith("<table>") and summary_of(found).ok


OWN = [cls for cls in registered() if cls.__module__.startswith("refold.")]


@pytest.mark.parametrize("cls", OWN, ids=lambda cls: cls.__name__)
def test_every_rewrite_verifies_on_its_own_examples(cls: type[Rewrite]):
    for model, inputs in cls.examples():
        gm = cls()(graph_of(model))
        assert len(history(gm)) == 1
        verification = verify(gm, inputs)
        assert verification.sites and verification.right, verification


def test_a_parameter_in_the_place_of_a_view_of_it_is_no_difference():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.token.expand(1, -1), x])

    x = torch.randn(1, 3)
    gm = refold.trace(Model(), x, dynamic=False)
    refold.RemoveNoOps()(gm)
    assert len(history(gm)) == 1
    assert verify(gm, x).right


def test_no_alarm_where_an_activation_leaves_next_to_nothing():
    """SiLU in place, so it is part of the site; of −500 it leaves 1e-215, whose square is 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 64, 1, bias=False), nn.BatchNorm2d(64), nn.SiLU(inplace=True)).eval()
    model[1].running_mean.normal_(0, 0.1)
    model[1].running_var.uniform_(0.5, 2)
    x = torch.randn(2, 16, 16, 16)
    gm = refold.FuseBatchNorm2dInConv2d()(refold.trace(model, x))
    found = verify(gm, x)
    assert found.sites and found.right, str(found)
