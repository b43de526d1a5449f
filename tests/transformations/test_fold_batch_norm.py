"""FoldBatchNorm is exact in float64 for every kind of layer, on both sides, and refuses where it would not be."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx import symbolic_trace
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import refold
from refold.examples import settle
from refold.testing.equivalence import deviations
from refold.transformations.fold_batch_norm import FoldBatchNorm

C = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
T = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
B = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def image(channels, dims):
    return torch.randn(2, channels, *[5] * dims, dtype=torch.float64)


def behind(dims, transposed, groups, bias, affine=True):
    layer = (T if transposed else C)[dims](4, 6, 3, stride=2, padding=1, groups=groups, bias=bias)
    return nn.Sequential(layer, B[dims](6, affine=affine)), image(4, dims)


def before(dims, bias, **settings):
    return nn.Sequential(B[dims](4), C[dims](4, 6, 3, bias=bias, **settings)), image(4, dims)


EXACT = {
    f"{'transposed ' if t else ''}{d}d, groups={g}, bias={b}": behind(d, t, g, b)
    for d in (1, 2, 3)
    for t in (False, True)
    for g, b in ((1, True), (2, False))
}
EXACT |= {
    "without an affine map": behind(2, True, 2, True, affine=False),
    "before 1d": before(1, True),
    "before 2d": before(2, False, stride=2),
    "before 3d": before(3, True, dilation=2),
    "before valid": before(2, True, padding="valid"),
    "before mirrored": before(2, True, padding=1, padding_mode="reflect"),
    "before circular": before(2, False, padding=1, padding_mode="circular"),
    "linear": (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), torch.randn(3, 4, dtype=torch.float64)),
    "before linear": (nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6)), torch.randn(3, 4, dtype=torch.float64)),
}


def traced(model, x):
    """A BatchNorm1d takes values with and without a batch, so that a symbolic trace does not tell its channels."""
    line = any(isinstance(m, nn.Conv1d | nn.ConvTranspose1d) for m in model)
    return refold.trace(model, x) if line else symbolic_trace(model)


@pytest.mark.parametrize("name", EXACT)
def test_exact_in_float64(name):
    torch.manual_seed(0)
    model, x = EXACT[name]
    model = settle(copy.deepcopy(model)).double().eval()
    reference = copy.deepcopy(model)
    gm = FoldBatchNorm()(traced(model, x))
    assert not any(isinstance(m, tuple(B.values())) for m in gm.modules())
    assert not list(deviations(symbolic_trace(reference), gm, (x,)))
    restored = refold.undo(gm)
    for (name, old), (_, new) in zip(reference.state_dict().items(), restored.state_dict().items(), strict=True):
        assert torch.equal(old, new), name


@pytest.mark.parametrize("name", ["transposed 2d, groups=2, bias=False", "before 3d", "before 1d"])
def test_what_was_trained_is_carried_back(name):
    torch.manual_seed(0)
    model, x = EXACT[name]
    gm = FoldBatchNorm()(traced(settle(copy.deepcopy(model)).double().eval(), x))
    weight = next(p for n, p in gm.named_parameters() if n.endswith("weight"))
    with torch.no_grad():
        weight.add_(torch.randn_like(weight))
    folded = copy.deepcopy(gm)
    assert not list(deviations(refold.undo(gm), folded, (x,)))


def test_functions_and_exported_graphs():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)

        def forward(self, x):
            y = F.conv_transpose2d(x, self.conv.weight, self.conv.bias, stride=2, groups=2, padding=1)
            n = self.norm
            return F.batch_norm(y, n.running_mean, n.running_var, n.weight, n.bias, eps=n.eps)

    model = settle(Functional()).double().eval()
    x = image(4, 2)
    reference = copy.deepcopy(model)
    gm = torch.export.export(model, (x,), strict=False).module()
    FoldBatchNorm()(gm)
    assert not any("batch_norm" in str(n.target) for n in gm.graph.nodes)
    assert not list(deviations(symbolic_trace(reference), gm, (x,)))


def test_rows_between():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            y = self.linear(x)
            return self.norm(y.flatten(0, 1)).reshape_as(y)

    model = settle(Rows()).double().eval()
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    reference = copy.deepcopy(model)
    gm = refold.trace(model, x)
    FoldBatchNorm()(gm)
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == ["linear"]
    for values in (x, torch.randn(3, 7, 3, dtype=torch.float64)):
        assert not list(deviations(symbolic_trace(reference), gm, (values,)))


def refusal(model, **settings):
    gm = symbolic_trace(settle(model).eval())
    FoldBatchNorm(**settings)(gm)
    assert not refold.history(gm)
    return refold.result(gm).refused[0].reason


def test_refusals():
    assert "pads with zeros" in refusal(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding=1)))
    assert "pads with zeros" in refusal(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding="same")))
    assert "grouped" in refusal(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, groups=2)))
    assert "at its borders" in refusal(nn.Sequential(nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 6, 3)))
    assert "no convolution or linear layer" in refusal(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.BatchNorm2d(4)))
    training = symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))
    FoldBatchNorm()(training)
    assert "in training mode" in refold.result(training).refused[0].reason


def test_rank_that_does_not_fit():
    class Line(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(self.linear(x))

    x = torch.randn(2, 4, 3)
    gm = refold.trace(settle(Line()).eval(), x)
    FoldBatchNorm()(gm)
    assert "axis 1 of a 3-D value" in refold.result(gm).refused[0].reason


def folded(model, x, captured=False, **settings):
    """The graph after folding, and the original in a copy of its own; x is made anew for each."""
    model = settle(model).double().eval()
    reference = copy.deepcopy(model)
    gm = refold.trace(model, x.clone()) if captured else symbolic_trace(model)
    FoldBatchNorm(**settings)(gm)
    for a, b in zip(reference(x.clone()), gm(x.clone()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    return gm


class WrittenBetween(nn.Module):
    def __init__(self, norm, layer):
        super().__init__()
        self.norm, self.layer = norm, layer

    def forward(self, x):
        x = x * 1.5
        n = self.norm(x)
        x.add_(1.0)
        return self.layer(n), x


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", ["before 2d", "before linear"])
def test_a_norm_whose_input_is_written_before_the_layer_runs_stays(name, captured):
    model, x = EXACT[name]
    gm = folded(WrittenBetween(*copy.deepcopy(model)), x, captured)
    assert "writes into what its batch norm reads" in str(refold.result(gm)) and not refold.history(gm)


def test_a_norm_in_another_mode_stays():
    gm = symbolic_trace(settle(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1))).eval())
    norm, layer = (n for n in gm.graph.nodes if n.op == "call_module")
    for place, mode in ((norm, False), (layer, True)):
        with gm.graph.inserting_before(place):
            gm.graph.call_function(torch._C._set_grad_enabled, (mode,))
    gm.recompile()
    FoldBatchNorm()(gm)
    assert "is switched between" in str(refold.result(gm)) and not refold.history(gm)


CHAINS = {
    "two norms between convolutions": [nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)],
    "two norms between linears": [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.Linear(3, 3)],
    "norm upon norm": [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3)],
    "convolution upon convolution": [nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)],
    "norms in front": [nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)],
}


@pytest.mark.parametrize("how", ["symbolic", "exported"])
@pytest.mark.parametrize("name", CHAINS)
def test_norms_in_a_row(name, how):
    torch.manual_seed(0)
    model = settle(nn.Sequential(*copy.deepcopy(CHAINS[name]))).double().eval()
    x = torch.randn(4, 3, 2, 2) if any(isinstance(m, nn.Conv2d) for m in model) else torch.randn(4, 3)
    reference, x = copy.deepcopy(model), x.double()
    gm = torch.export.export(model, (x,)).module() if how == "exported" else symbolic_trace(model)
    code = gm.code
    FoldBatchNorm()(gm)
    norms, linears = (sum(isinstance(m, kinds) for m in model) for kinds in (tuple(B.values()), nn.Linear))
    # where the rank is not known, a layer that looks at it when it runs takes one norm alone
    most = min(norms, linears) if how == "symbolic" and linears else norms
    assert len(refold.result(gm).rewritten) == most
    torch.testing.assert_close(gm(x), reference(x), rtol=1e-12, atol=1e-12)
    refold.undo(gm)
    assert gm.code == code
    for (name, old), (_, new) in zip(reference.state_dict().items(), gm.state_dict().items(), strict=True):
        assert torch.equal(old, new), name


@pytest.mark.parametrize(
    ("layer", "norm", "shape"),
    [
        (nn.Conv1d(3, 6, 3, padding=1), nn.BatchNorm1d(6), (3, 6)),
        (nn.Conv2d(3, 4, 1), nn.BatchNorm1d(4), (3, 4, 4)),
        (nn.Conv3d(3, 4, 1), nn.BatchNorm2d(4), (3, 4, 4, 4)),
    ],
)
def test_without_a_batch_the_norm_runs_over_another_axis(layer, norm, shape):
    gm = folded(nn.Sequential(layer, norm), torch.randn(shape, dtype=torch.float64))
    assert "rank of its input is not known" in str(refold.result(gm)) and not refold.history(gm)


class OwnWeight(nn.Module):
    def __init__(self, layer, norm):
        super().__init__()
        self.layer, self.norm = layer, norm

    def forward(self, x):
        return x + self.norm(self.layer(self.layer.weight))


@pytest.mark.parametrize(
    ("layer", "norm"), [(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)), (nn.Linear(5, 5), nn.BatchNorm1d(5))]
)
def test_a_layer_that_reads_its_own_weight_stays(layer, norm):
    gm = folded(OwnWeight(layer, norm), torch.randn(layer.weight.shape, dtype=torch.float64))
    assert "is also its input" in str(refold.result(gm)) and not refold.history(gm)


class OneAffineTensor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)

    def forward(self, x):
        n = self.norm
        return F.batch_norm(self.layer(x), n.running_mean, n.running_var, n.weight, n.weight)


def test_one_tensor_in_two_roles_stays():
    gm = folded(OneAffineTensor(), torch.randn(4, 5, dtype=torch.float64))
    assert "its beta is also its gamma" in str(refold.result(gm)) and not refold.history(gm)


@pytest.mark.parametrize("first", ["layer", "norm"])
def test_weights_that_would_overflow_stay(first):
    layer, norm = nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1, eps=1e-7)
    nn.init.constant_(layer.weight, 100.0)
    nn.init.zeros_(layer.bias)
    norm.running_var.fill_(1e-6)
    model = nn.Sequential(*((layer, norm) if first == "layer" else (norm, layer))).half().eval()
    gm, x = symbolic_trace(model), torch.full((1, 1, 1, 1), 1e-4).half()
    expected = copy.deepcopy(gm)(x)
    FoldBatchNorm()(gm)
    assert "finite" in str(refold.result(gm)) and not refold.history(gm)
    assert torch.equal(gm(x), expected) and expected.isfinite().all()
    norm.running_var.fill_(1.0)
    assert len(refold.result(FoldBatchNorm()(symbolic_trace(model))).rewritten) == 1


def test_a_module_is_not_taken_for_a_reshape_by_its_name():
    class Doubles(nn.Module):
        def forward(self, x):
            return x.flatten(0, 1) * x.flatten(0, 1)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.reshape, self.norm = nn.Linear(3, 4), Doubles(), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(self.reshape(self.layer(x)))

    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, module, path):
            return isinstance(module, Doubles) or super().is_leaf_module(module, path)

    model, x = settle(Model()).double().eval(), torch.randn(2, 5, 3, dtype=torch.float64)
    reference = copy.deepcopy(model)
    gm = torch.fx.GraphModule(model, Leaves().trace(model))
    FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(x)
    FoldBatchNorm()(gm)
    torch.testing.assert_close(gm(x), reference(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("captured", [False, True])
def test_an_input_that_is_a_buffer(captured):
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
            self.register_buffer("rows", torch.randn(5, 4))

        def forward(self, x):
            return x + self.norm(F.linear(self.rows, self.layer.weight, self.layer.bias))

    gm = folded(Constant(), torch.randn(5, 4, dtype=torch.float64), captured)
    assert len(refold.result(gm).rewritten) == 1


def test_more_inputs_than_outputs_of_a_transposed_convolution():
    torch.manual_seed(0)
    model = settle(nn.Sequential(nn.ConvTranspose2d(64, 32, 3, groups=2), nn.BatchNorm2d(32)).eval())
    reference = copy.deepcopy(model).state_dict()
    gm = copy.deepcopy(FoldBatchNorm()(symbolic_trace(model)))
    (record,) = refold.history(gm)[0].maps
    assert record.corrections["weight"].nbytes < 0.05 * reference["0.weight"].numel() * 4
    assert all(torch.equal(tensor, reference[name]) for name, tensor in refold.undo(gm).state_dict().items())


def test_the_larger_of_two_layers_in_a_row_is_folded_first():
    torch.manual_seed(0)
    layers = (nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 64, 9), nn.BatchNorm2d(64))
    model, x = settle(nn.Sequential(*layers)).double().eval(), torch.randn(1, 4, 12, 12, dtype=torch.float64)
    reference = copy.deepcopy(model)
    gm = FoldBatchNorm()(symbolic_trace(model))
    assert [done.what for done in refold.result(gm).rewritten] == ["folded _3 into _2", "folded _1 into _0"]
    assert not list(deviations(symbolic_trace(reference), gm, (x,)))
    del model, layers
    for name, tensor in refold.undo(gm).state_dict().items():
        assert torch.equal(tensor, reference.state_dict()[name]), name
