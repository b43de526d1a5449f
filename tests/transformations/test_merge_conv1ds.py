"""MergeLinears over GPT-2's Conv1D: weights of (in, out), `addmm` on rows."""

import copy

import pytest
import torch
from torch import nn

import refold
from refold.capture.tracing import trace
from refold.graph.targets import name_of
from refold.transformations.eliminate_common_subexpressions import EliminateCommonSubexpressions
from refold.transformations.merge_linears import MergeLinears


class Conv1D(nn.Module):
    """As transformers writes it."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.nf = outputs
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        size_out = (*x.size()[:-1], self.nf)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.key, self.value, self.linear = Conv1D(3, 4), Conv1D(5, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.norm(x)
        return torch.cat([self.key(x).relu(), self.value(x), self.linear(x)], -1)


@pytest.mark.parametrize("dynamic", ["auto", False])
def test_merged_and_back(dynamic):
    x = torch.randn(2, 3, 4)
    model = Branches().double()
    reference, before = copy.deepcopy(model), {k: v.clone() for k, v in model.state_dict().items()}
    gm = trace(model, x.double(), dynamic=dynamic)
    code = gm.code
    MergeLinears()(EliminateCommonSubexpressions()(gm))
    assert [name_of(n) for n in gm.graph.nodes].count("addmm") == 1
    assert gm.key_value_merged.weight.shape == (4, 8)
    assert torch.allclose(gm(x.double()), reference(x.double()), rtol=1e-12, atol=1e-12)
    refold.undo(gm, None)
    assert gm.code == code
    assert all(torch.equal(gm.state_dict()[k], v) and gm.state_dict()[k].is_contiguous() for k, v in before.items())


def test_training_while_merged_comes_back():
    x = torch.randn(2, 3, 4)
    gm = MergeLinears()(EliminateCommonSubexpressions()(trace(Branches(), x)))
    with torch.no_grad():
        gm.key_value_merged.weight.add_(1)
    expected = gm(x)
    refold.undo(gm, None)
    assert torch.allclose(gm(x), expected, rtol=1e-5, atol=1e-5)


def test_scaled_addmm_is_left_alone():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v, self.b = (nn.Parameter(torch.randn(s)) for s in ((4, 3), (4, 3), (3,)))

        def forward(self, x):
            return torch.addmm(self.b, x, self.w, beta=2) + torch.addmm(self.b, x, self.v)

    gm = trace(Scaled(), torch.randn(2, 4))
    MergeLinears()(gm)
    assert not refold.history(gm)
    assert len(refold.result(gm).refused) == 2
