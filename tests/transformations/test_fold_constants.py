"""FoldConstants evaluates what is the same in every run, and nothing that training, checkpoints or chance change."""

import copy

import torch
from torch import nn

import refold
from refold.capture import trace
from refold.hollow import hollow
from refold.purity import name_of
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
