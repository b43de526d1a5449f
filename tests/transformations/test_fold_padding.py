"""FoldPadding lets convolutions pad by themselves where that is the same, and nowhere else."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import symbolic_trace

import refold
from refold.capture.tracing import trace
from refold.graph.targets import name_of
from refold.transformations.fold_padding import FoldPadding
from refold.verification.verifier import verify


class Of(nn.Module):
    """A pad and a convolution behind something else."""

    def __init__(self, pad, conv):
        super().__init__()
        self.pad = pad
        self.conv = conv

    def forward(self, x):
        return self.conv(self.pad(x.sin())).relu()


X1, X2, X3 = torch.randn(2, 3, 9), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 5, 6, 7)
DEPTHWISE = nn.Conv2d(3, 6, 3, groups=3, bias=False)

SAME = {
    "a module": (nn.ZeroPad2d(1), DEPTHWISE, X2, (1, 1)),
    "zeros by another name": (nn.ConstantPad2d((2, 2, 1, 1), 0.0), DEPTHWISE, X2, (1, 2)),
    "a function": (lambda x: F.pad(x, (1, 1, 2, 2)), nn.Conv2d(3, 4, 3), X2, (2, 1)),
    "a function, all by name": (lambda x: F.pad(input=x, pad=[1, 1], mode="constant", value=0), DEPTHWISE, X2, (0, 1)),
    "beside the padding it has": (nn.ZeroPad2d(1), nn.Conv2d(3, 4, 3, padding=(0, 2)), X2, (1, 3)),
    "stride and dilation": (nn.ZeroPad2d(2), nn.Conv2d(3, 4, 2, stride=2, dilation=2), X2, (2, 2)),
    "along one axis": (nn.ZeroPad1d(2), nn.Conv1d(3, 4, 3), X1, (2,)),
    "beside a padding by name": (nn.ZeroPad1d(2), nn.Conv1d(3, 4, 3, padding="valid"), X1, (2,)),
    "along three axes": (nn.ZeroPad3d((1, 1, 2, 2, 0, 0)), nn.Conv3d(3, 4, 3), X3, (0, 2, 1)),
    "no batch": (nn.ZeroPad2d(1), nn.Conv2d(3, 4, 3), torch.randn(3, 6, 5), (1, 1)),
    "nothing along the channels": (lambda x: F.pad(x, (1, 1, 1, 1, 0, 0)), nn.Conv2d(3, 4, 3), X2, (1, 1)),
}
OTHERS = {
    "more on one side": (nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(3, 4, 3, stride=2), X2, "more on one side"),
    "something else than zeros": (nn.ConstantPad2d(1, 0.5), nn.Conv2d(3, 4, 3), X2, "else than zeros"),
    "a mirror image": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), DEPTHWISE, X2, "else than zeros"),
    "a convolution that mirrors": (
        nn.ZeroPad2d(1),
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        X2,
        "else than zeros",
    ),
    "a convolution that pads by a rule": (nn.ZeroPad2d(1), nn.Conv2d(3, 4, 3, padding="same"), X2, "by a rule"),
    "cut off": (nn.ZeroPad2d(-1), nn.Conv2d(3, 4, 3), X2, "cuts"),
    "channels": (lambda x: F.pad(x, (1, 1, 1, 1, 1, 1)), nn.Conv2d(5, 4, 3), X2, "channels"),
}


def is_pad(node):
    return "pad" in name_of(node)


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("captured", [False, True])
def test_the_convolution_pads_by_itself(name, captured):
    pad, conv, x, padding = SAME[name]
    model = Of(pad, conv).eval()
    gm = trace(model, x, dynamic=False) if captured else symbolic_trace(model)
    reference, before, seen = copy.deepcopy(model).double()(x.double()), gm.code, copy.deepcopy(conv.__dict__)
    FoldPadding()(gm)
    assert not any(map(is_pad, gm.graph.nodes))
    assert tuple(gm.conv.padding) == padding
    assert verify(gm, x).right
    assert gm(x).shape == reference.shape
    exact = copy.deepcopy(gm).double()(x.double())
    torch.testing.assert_close(exact, reference, rtol=1e-12, atol=1e-12)
    assert conv.padding == seen["padding"], "the model that was traced is never changed"
    assert repr(gm.conv) == repr(nn.modules.conv.__dict__[type(conv).__name__](**_settings(conv, padding)))
    refold.undo(gm)
    assert gm.code == before and torch.equal(gm(x), model(x))


def _settings(conv, padding):
    names = ("in_channels", "out_channels", "kernel_size", "stride", "dilation", "groups")
    return {name: getattr(conv, name) for name in names} | {"padding": padding, "bias": conv.bias is not None}


@pytest.mark.parametrize("name", OTHERS)
def test_other_pads_stay_and_say_why(name):
    pad, conv, _, reason = OTHERS[name]
    gm = symbolic_trace(Of(pad, conv))
    result = refold.explain(gm, FoldPadding())
    assert not result.rewritten and reason in str(result)
    before = gm.code
    assert FoldPadding()(gm).code == before


@pytest.mark.parametrize("amounts", [(1, 1, 1, 1), (1, 1)])
def test_convolutions_that_are_functions(amounts):
    weight, x = torch.randn(4, 3, 3, 3), torch.randn(2, 3, 6, 5)

    class Functions(nn.Module):
        def forward(self, x, weight):
            y = F.conv2d(F.pad(x, amounts), self.weight)
            return F.conv2d(F.pad(y, amounts), weight=self.other, bias=None, stride=2, padding=1)

    model = Functions()
    model.weight, model.other = nn.Parameter(weight), nn.Parameter(torch.randn(4, 4, 3, 3))
    gm = symbolic_trace(model)
    FoldPadding()(gm)
    assert not any(map(is_pad, gm.graph.nodes)) and len(refold.result(gm).rewritten) == 2
    exact, reference = copy.deepcopy(gm).double(), copy.deepcopy(model).double()
    args = (x.double(), weight.double())
    torch.testing.assert_close(exact(*args), reference(*args), rtol=1e-12, atol=1e-12)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3)

    def forward(self, x):
        return self.conv(F.pad(self.conv(x), (1, 1, 1, 1)))


class ReadTwice(Twice):
    def forward(self, x):
        wide = F.pad(x, (1, 1, 1, 1))
        return self.conv(wide), wide


class WrittenBetween(Twice):
    def forward(self, x):
        x = x + 1
        wide = F.pad(x, (1, 1, 1, 1))
        x.mul_(2)
        return self.conv(wide), x


class ComputedByConvolution(Twice):
    def forward(self, x):
        return F.conv2d(F.pad(x, (1, 1, 1, 1)), self.conv.weight, padding=x.shape[0])


class Unread(Twice):
    def forward(self, x):
        return F.pad(self.conv(x), (1, 1, 1, 1)).relu()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Twice(), "called more than once"),
        (ReadTwice(), "others read"),
        (WrittenBetween(), "mul_ writes into add before conv"),
        (Unread(), "no convolution"),
        (ComputedByConvolution(), "pads by a rule"),
    ],
)
def test_what_others_use_or_write_stays(model, reason):
    gm = symbolic_trace(model)
    assert reason in str(refold.explain(gm, FoldPadding()))
    FoldPadding()(gm)
    assert len(refold.history(gm)) == 0


def test_a_pad_of_a_pad_and_sizes_that_are_computed():
    class Model(Twice):
        def forward(self, x):
            y = self.conv(F.pad(F.pad(x, (1, 1, 0, 0)), (2, 2, 1, 1)))
            return F.conv2d(F.pad(y, (x.shape[0],) * 4), self.conv.weight)

    gm = symbolic_trace(Model())
    FoldPadding()(gm)
    assert tuple(gm.conv.padding) == (1, 3) and sum(map(is_pad, gm.graph.nodes)) == 1
    assert "is computed" in str(refold.result(gm))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x)


def test_a_convolution_that_its_parent_runs_as_well_stays():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return self.block(x), self.block.conv(F.pad(x, (1, 1, 1, 1)))

    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, module, path):
            return isinstance(module, Block) or super().is_leaf_module(module, path)

    model = Both()
    gm, reference = torch.fx.GraphModule(model, Leaves().trace(model)), copy.deepcopy(model)
    FoldPadding()(gm)
    assert len(refold.history(gm)) == 0 and "also run by block" in str(refold.result(gm))
    assert all(map(torch.equal, gm(X2), reference(X2)))


def test_a_pad_in_another_mode_stays():
    gm = symbolic_trace(Of(nn.ZeroPad2d(1), nn.Conv2d(3, 4, 3)))
    pad, conv = (n for n in gm.graph.nodes if n.op == "call_module")
    for place, mode in ((pad, False), (conv, True)):
        with gm.graph.inserting_before(place):
            gm.graph.call_function(torch._C._set_grad_enabled, (mode,))
    gm.recompile()
    FoldPadding()(gm)
    assert len(refold.history(gm)) == 0 and "switches modes before conv" in str(refold.result(gm))
