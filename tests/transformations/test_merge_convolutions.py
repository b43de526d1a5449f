"""MergeConvolutions joins convolutions of equal geometry, and only those."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import symbolic_trace

import refold
from refold.transformations.merge_convolutions import MergeConvolutions


class Parallel(nn.Module):
    def __init__(self, *convs):
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, x):
        return [conv(x).sin() for conv in self.convs]


def rewritten(*convs, exported=False, dims=2):
    x = torch.randn(2, 4, *[6] * dims, dtype=torch.float64)
    model = Parallel(*convs).double()
    reference = copy.deepcopy(model)
    gm = torch.export.export(model, (x,), strict=False).module() if exported else symbolic_trace(model)
    code = gm.code
    MergeConvolutions()(gm)
    for a, b in zip(gm(x), reference(x), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    return gm, code, reference


CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@pytest.mark.parametrize("exported", [False, True], ids=["modules", "exported"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_merged_and_back(dims, exported):
    settings = {"kernel_size": 3, "padding": 1, "stride": 2, "bias": dims != 2}
    convs = [CONVS[dims](4, n, **settings) for n in (3, 5, 2)]
    gm, code, reference = rewritten(*convs, exported=exported, dims=dims)
    assert len([n for n in gm.graph.nodes if "conv" in str(n.target) and n.op.startswith("call")]) == 1
    assert len(refold.result(gm).rewritten) == 1
    MergeConvolutions()(gm, reverse=True)
    assert gm.code == code
    for (name, old), (_, new) in zip(reference.state_dict().items(), gm.state_dict().items(), strict=True):
        assert torch.equal(old, new), name


@pytest.mark.parametrize("how", ["symbolic", "captured"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_an_input_without_a_batch(dims, how):
    model = Parallel(*(CONVS[dims](4, n, 3, padding=1) for n in (6, 5))).double()
    x = torch.randn(4, *[6] * dims, dtype=torch.float64)
    reference = copy.deepcopy(model)
    gm = refold.trace(model, x) if how == "captured" else symbolic_trace(model)
    code = gm.code
    MergeConvolutions()(gm)
    assert len(refold.result(gm).rewritten) == 1
    for a, b in zip(gm(x), reference(x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    refold.undo(gm)
    assert gm.code == code


@pytest.mark.parametrize(
    "convs",
    [
        (nn.Conv2d(4, 2, 3), nn.Conv2d(4, 2, 1)),
        (nn.Conv2d(4, 2, 3), nn.Conv2d(4, 2, 3, stride=2)),
        (nn.Conv2d(4, 2, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1, padding_mode="reflect")),
        (nn.Conv2d(4, 2, 3), nn.Conv2d(4, 2, 3, bias=False)),
        (nn.Conv2d(4, 2, 3).requires_grad_(False), nn.Conv2d(4, 2, 3)),
        (nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, groups=2)),
        [nn.Conv2d(4, 2, 3).to(memory_format=torch.channels_last) for _ in range(2)],
    ],
    ids=["kernel", "stride", "padding mode", "bias", "frozen", "groups", "layout"],
)
def test_left_alone(convs):
    gm, code, _ = rewritten(*convs)
    assert gm.code == code and not refold.history(gm)
    assert len(refold.result(gm).refused) == 2


def test_one_module_called_twice_and_writes_between():
    conv = nn.Conv2d(4, 2, 3)
    gm, _, _ = rewritten(conv, conv)
    assert not refold.history(gm)

    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 2, 1), nn.Conv2d(4, 2, 1)

        def forward(self, x):
            x = x * 1
            first = self.a(x)
            x.add_(1)
            return first + self.b(x)

    gm = symbolic_trace(Written())
    MergeConvolutions()(gm)
    assert not refold.history(gm) and "writes into its input" in refold.result(gm).refused[0].reason


def test_training_while_merged_comes_back():
    gm, _, _ = rewritten(nn.Conv2d(4, 2, 3), nn.Conv2d(4, 3, 3))
    merged = next(m for m in gm.modules() if isinstance(m, nn.Conv2d))
    with torch.no_grad():
        merged.weight.mul_(2)
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    expected = gm(x)
    refold.undo(gm)
    assert all(torch.allclose(a, b) for a, b in zip(gm(x), expected, strict=True))


@pytest.mark.parametrize("functions", [False, True])
def test_an_input_that_is_a_buffer(functions):
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 2, 1), nn.Conv2d(3, 2, 1)
            self.register_buffer("image", torch.randn(2, 3, 4, 4))

        def run(self, conv):
            return F.conv2d(self.image, conv.weight, conv.bias) if functions else conv(self.image)

        def forward(self, x):
            return x + self.run(self.a) + self.run(self.b)

    model, x = Constant().double(), torch.randn(2, 2, 4, 4, dtype=torch.float64)
    reference, gm = copy.deepcopy(model), refold.trace(model, x)
    code = gm.code
    MergeConvolutions()(gm)
    assert len(refold.result(gm).rewritten) == 1
    torch.testing.assert_close(gm(x), reference(x), rtol=1e-12, atol=1e-12)
    refold.undo(gm)
    assert gm.code == code


def test_views_with_sizes_given_by_name():
    class Viewed(Parallel):
        def forward(self, x):
            return [conv(input=x).view(size=(2, -1)) for conv in self.convs]

    model, x = Viewed(nn.Conv2d(4, 2, 1), nn.Conv2d(4, 3, 1)).double(), torch.randn(2, 4, 3, 3, dtype=torch.float64)
    reference, gm = copy.deepcopy(model), symbolic_trace(model)
    MergeConvolutions()(gm)
    assert len(refold.result(gm).rewritten) == 1
    for a, b in zip(gm(x), reference(x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
