"""FoldConstants evaluates what is the same in every run, and nothing that training, checkpoints or chance change."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import refold
from refold.capture import trace
from refold.checkpoints import CheckpointMismatch
from refold.errors import WeightsChanged
from refold.hollow import hollow
from refold.purity import name_of
from refold.rewrite import Site
from refold.testing.laws import LawBroken, check_law, l12_original_checkpoint_loads
from refold.transformations.fold_constants import FoldConstants


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.randn(4))
        self.register_buffer("kept", torch.arange(4.0))
        self.register_buffer("extra", torch.arange(4.0) + 1, persistent=False)

    def forward(self, x):
        return self.function(self, x)


X = torch.randn(3, 4)


def folded(function, **settings):
    gm = trace(Of(function), X, dynamic=False)
    original = copy.deepcopy(gm)
    FoldConstants(**settings)(gm)
    assert torch.equal(gm(X), original(X))
    return gm


def names(gm):
    return [name_of(n) for n in gm.graph.nodes if n.op.startswith("call")]


def test_a_table_is_computed_once_and_moves_with_the_module():
    gm = folded(lambda m, x: x * torch.outer(torch.arange(3), torch.full((4,), 0.5)).cos())
    assert names(gm) == ["mul"]
    assert [name for name, _ in gm.named_buffers()] == ["constants.cos"]
    assert gm.state_dict().keys() == trace(Of(lambda m, x: x * 2), X).state_dict().keys()
    assert next(copy.deepcopy(gm).to("meta").buffers()).is_meta


def test_only_buffers_outside_the_checkpoint_are_constant():
    assert names(folded(lambda m, x: x + m.extra.sin())) == ["add"]
    assert names(folded(lambda m, x: x + m.kept.sin())) == ["sin", "add"]
    assert names(folded(lambda m, x: x + m.scale.sin())) == ["sin", "add"]


def test_parameters_on_request():
    gm = folded(lambda m, x: x + m.scale.sin() * m.kept, parameters=True)
    assert names(gm) == ["add"]
    refold.undo(gm)
    assert names(gm) == ["sin", "mul", "add"] and gm.scale.requires_grad


def test_chance_is_not_folded():
    gm = trace(Of(lambda m, x: x + torch.rand(4).sin()), X, dynamic=False)
    FoldConstants()(gm)
    assert names(gm)[-3:] == ["rand", "sin", "add"] and not refold.history(gm)


def test_what_leaves_or_is_written_into_is_not_folded():
    gm = trace(Of(lambda m, x: (x + 1, m.extra.sin()[:2])), X, dynamic=False)
    FoldConstants()(gm)
    assert "leaves the graph" in refold.result(gm).refused[0].reason

    def written(m, x):
        table = m.extra.sin()
        table.add_(x[0])
        return table + x

    gm = trace(Of(written), X, dynamic=False)
    FoldConstants()(gm)
    assert torch.equal(gm(X), gm(X)) and "sin" in names(gm)


def test_the_limit_and_free_expansion():
    assert "sin" in names(folded(lambda m, x: x + m.extra.sin(), limit=15))
    gm = folded(lambda m, x: x + m.extra.sin().expand(3, 4), limit=16)
    assert names(gm) == ["expand", "add"]


def test_equal_constants_are_kept_once():
    gm = trace(Of(lambda m, x: (x + torch.arange(4).cos()) * torch.arange(4).cos()), X, dynamic=False)
    refold.EliminateCommonSubexpressions()(gm)
    FoldConstants()(gm)
    assert [name for name, _ in gm.named_buffers()] == ["constants.cos"]
    assert len(refold.result(gm).rewritten) == 1


def test_a_module_without_values_is_folded_at_the_same_places():
    gm = trace(Of(lambda m, x: x + m.extra.sin()), X, dynamic=False)
    paper = hollow(gm)
    FoldConstants()(gm)
    FoldConstants()(paper)
    assert paper.code == gm.code and all(buffer.is_meta for buffer in paper.buffers())


def test_open_sizes_are_no_constants():
    gm = trace(Of(lambda m, x: x + torch.arange(x.shape[0])[:, None]), X)
    FoldConstants()(gm)
    assert "arange" in names(gm)
    assert gm(torch.zeros(5, 4))[4, 0] == 4


def test_the_reverse_is_exact():
    gm = trace(Of(lambda m, x: x + m.extra.sin()), X, dynamic=False)
    code, buffers = gm.code, dict(gm.named_buffers())
    FoldConstants()(gm, reverse=False)
    assert gm.code != code
    FoldConstants()(gm, reverse=True)
    assert gm.code == code
    assert all(dict(gm.named_buffers())[k] is v for k, v in buffers.items()) and len(buffers) == 1


# --- checkpoints ---------------------------------------------------------------------------------------------------


def another_checkpoint(gm):
    return {name: tensor + torch.linspace(0.5, 1, tensor.numel()) for name, tensor in gm.state_dict().items()}


def rewritten_and_expected(function, **settings):
    """A folded module, a checkpoint, and the module that never was folded with that checkpoint."""
    plain = trace(Of(function), X, dynamic=False)
    gm, checkpoint = copy.deepcopy(plain), another_checkpoint(plain)
    FoldConstants(**settings)(gm)
    assert "sin" not in names(gm)
    plain.load_state_dict(checkpoint)
    return gm, checkpoint, plain


def assert_loads(gm, checkpoint, plain):
    addresses = {name: tensor.data_ptr() for name, tensor in (*gm.named_parameters(), *gm.named_buffers())}
    refold.load_original_state_dict(gm, checkpoint)
    assert torch.equal(gm(X), plain(X))
    assert addresses == {name: t.data_ptr() for name, t in (*gm.named_parameters(), *gm.named_buffers())}
    given = refold.original_state_dict(gm)
    assert list(given) == list(checkpoint) and all(torch.equal(given[k], v) for k, v in checkpoint.items())
    refold.undo(gm, None)
    assert gm.code == plain.code and torch.equal(gm(X), plain(X))
    assert all(torch.equal(gm.state_dict()[k], v) for k, v in checkpoint.items())


def test_a_constant_without_weights_states_its_map_and_the_original_checkpoint_loads():
    gm, checkpoint, plain = rewritten_and_expected(lambda m, x: x * m.scale + m.extra.sin() + m.kept)
    (record,) = refold.history(gm)[0].maps
    assert str(record.map) == "constant=constants.sin = Constant()()" and not refold.history(gm)[0].prints
    assert refold.history(gm).nbytes == 0
    constant = gm.constants.sin.clone()
    assert_loads(gm, checkpoint, plain)
    assert torch.equal(constant, (torch.arange(4.0) + 1).sin())


def test_what_depends_on_weights_is_computed_again_from_the_checkpoint():
    assert_loads(
        *rewritten_and_expected(lambda m, x: x * m.scale.sin() + m.kept.sin() + m.extra.sin(), parameters=True)
    )
    gm, _, _ = rewritten_and_expected(lambda m, x: x * m.scale.sin() + m.extra.sin(), parameters=True)
    assert [len(gm.constants._buffers), len(refold.history(gm)[0].maps), len(refold.history(gm)[0].prints)] == [2, 1, 1]


def test_a_wrong_checkpoint_is_refused_whole_where_it_is_computed_again():
    gm, checkpoint, _ = rewritten_and_expected(lambda m, x: x * m.scale.sin() + m.kept, parameters=True)
    before = {name: tensor.clone() for name, tensor in (*gm.named_parameters(), *gm.named_buffers())}
    for wrong in ({"scale": checkpoint["scale"]}, checkpoint | {"more": X}, checkpoint | {"scale": X}):
        with pytest.raises(CheckpointMismatch, match=r"kept|more|size mismatch"):
            refold.load_original_state_dict(gm, wrong)
    now = dict((*gm.named_parameters(), *gm.named_buffers()))
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items())
    outcome = refold.load_original_state_dict(gm, {"scale": checkpoint["scale"]}, strict=False)
    assert outcome.missing_keys == ["kept"] and torch.equal(gm.constants.sin, checkpoint["scale"].sin())


def test_a_constant_that_was_written_into_is_not_dropped_silently():
    gm, _, _ = rewritten_and_expected(lambda m, x: x * m.scale + m.extra.sin())
    gm.constants.sin.data.mul_(2)
    for give_back in (refold.undo, refold.original_state_dict):
        with pytest.raises(WeightsChanged, match=r"constants\.sin cannot be carried back"):
            give_back(gm)
    refold.undo(gm, weights="original")
    assert "sin" in names(gm)


@pytest.mark.parametrize("casts", [(torch.float16,), (torch.bfloat16, torch.float32), (torch.float64,)])
def test_a_cast_is_no_change_of_a_constant(casts):
    gm, _, plain = rewritten_and_expected(lambda m, x: x * m.scale + m.extra.sin())
    for dtype in casts:
        gm.to(dtype)
    assert gm.constants.sin.dtype == casts[-1] and list(refold.original_state_dict(gm)) == ["scale"]
    refold.undo(gm)
    assert gm.code == plain.code


def test_the_law_catches_a_constant_that_is_said_to_need_no_weight():
    class Careless(FoldConstants):
        def find(self, view):
            for item in super().find(view):
                yield replace(item, detail=(*item.detail[:2], False)) if isinstance(item, Site) else item

    example = trace(Of(lambda m, x: x * m.scale.sin()), X, dynamic=False), (X,)
    check_law(l12_original_checkpoint_loads, FoldConstants(parameters=True), *example)
    with pytest.raises(LawBroken, match="is not what the model computes with"):
        check_law(l12_original_checkpoint_loads, Careless(parameters=True), *example)
