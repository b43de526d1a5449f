"""A merged adapter comes out again without a trace: bit for bit, however often, in every dtype."""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import refold
from refold.checkpoints.checkpoint_load import load_original_state_dict
from refold.fingerprint import same_bits
from refold.testing.equivalence import deviations
from refold.transformations.merge_lora import MergeLora


class Adapted(nn.Module):
    """A layer with an adapter, in whatever form `combine` writes it."""

    def __init__(self, combine: Callable[[Adapted, torch.Tensor], torch.Tensor], bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 16, bias=bias)
        self.a, self.b = nn.Linear(24, 3, bias=False), nn.Linear(3, 16, bias=False)
        self.a2, self.b2 = nn.Linear(24, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.drop, self.identity = nn.Dropout(0.3), nn.Identity()
        self.combine = combine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.combine(self, x))


FORMS: dict[str, Callable[[Adapted, torch.Tensor], torch.Tensor]] = {
    "layer first": lambda m, x: m.layer(x) + m.b(m.a(x)) * 0.7,
    "adapter first": lambda m, x: 0.7 * m.b(m.a(x)) + m.layer(x),
    "no scaling": lambda m, x: m.layer(x) + m.b(m.a(x)),
    "scaled inside": lambda m, x: m.layer(x) + m.b(m.a(x * 0.5) * 3),
    "idle dropout": lambda m, x: m.layer(x) + m.b(m.a(m.drop(x))) * 2.0,
    "functional dropout": lambda m, x: m.layer(x) + m.b(m.a(F.dropout(x, 0.5, False))) * 2.0,
    "identity": lambda m, x: m.layer(x) + m.b(m.a(m.identity(x))) * 2.0,
    "cast": lambda m, x: m.layer(x) + m.b(m.a(x.to(torch.float32))) * 2.0,
    "torch.add": lambda m, x: torch.add(m.layer(x), torch.mul(m.b(m.a(x)), 2.0)),
    "method": lambda m, x: m.layer(x).add(m.b(m.a(x)).mul(2.0)),
    "in place": lambda m, x: operator.iadd(m.layer(x), m.b(m.a(x)) * 2.0),
    "functions": lambda m, x: (
        F.linear(x, m.layer.weight, m.layer.bias) + F.linear(F.linear(x, m.a.weight), m.b.weight) * 0.3
    ),
    "two adapters": lambda m, x: m.layer(x) + m.b(m.a(x)) * 0.7 + m.b2(m.a2(x)) * -0.2,
}


def traced(form: str, dtype: torch.dtype = torch.float32, bias: bool = True) -> torch.fx.GraphModule:
    torch.manual_seed(0)
    return torch.fx.symbolic_trace(Adapted(FORMS[form], bias).eval().to(dtype))


def assert_restored(gm: torch.fx.GraphModule, before: torch.fx.GraphModule) -> None:
    assert gm.code == before.code
    assert list(gm.state_dict()) == list(before.state_dict())
    for name, tensor in before.state_dict().items():
        assert same_bits(gm.state_dict()[name], tensor), name


@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_one_linear_layer(form: str) -> None:
    gm = traced(form)
    before = copy.deepcopy(gm)
    x = torch.randn(5, 24)
    expected = copy.deepcopy(before).double().to(torch.float64)
    MergeLora()(gm)
    linears = [n for n in gm.graph.nodes if "linear" in str(n.target) or str(n.target) in ("layer", "a", "b")]
    assert len(linears) == 1, gm.code
    assert not any(name in gm.state_dict() for name in ("a.weight", "b.weight"))
    if form != "cast":
        # |y - ŷ| for a sum of n products: (n + 2) roundings of eps/2, of W', of the products and of their sum
        weight, bias = gm.layer.weight.detach(), gm.layer.bias.detach()
        scale = (x.abs() @ weight.abs().T + bias.abs()).double()
        bound = 2 * (24 + 5) * torch.finfo(torch.float32).eps * float(scale.max())
        assert (gm(x).double() - expected(x.double())).abs().max() <= bound
    refold.undo(gm)
    assert_restored(gm, before)


def test_without_a_bias_and_after_a_round_trip_by_deepcopy() -> None:
    gm = traced("layer first", bias=False)
    before = copy.deepcopy(gm)
    MergeLora()(gm)
    twin = copy.deepcopy(gm)
    del gm
    refold.undo(twin)
    assert_restored(twin, before)


def no_gradients(x: torch.fx.Proxy) -> None:
    x.tracer.create_node("call_function", torch._C._set_grad_enabled, (False,), {})


REFUSED: dict[str, tuple[Callable[[Adapted, torch.Tensor], torch.Tensor], str]] = {
    "output read": (lambda m, x: m.layer(x) + m.b(m.a(x)) * 0.7 + m.layer(x).sum(), "more than once"),
    "inner read": (
        lambda m, x: m.layer(x) + m.b(m.a(x)) * 0.7 + m.a2(m.a(x) @ torch.ones(3, 24)).sum(),
        "also read|more",
    ),
    "written between": (lambda m, x: (x := x + 0, m.layer(x), x.add_(1))[1] + m.b(m.a(x)), "writes into its input"),
    "written before both": (
        lambda m, x: (x := x + 0, h := x * 2.0, x.add_(1), m.layer(x) + m.b(m.a(h)))[3],
        "writes into its input",
    ),
    "scaled in place": (lambda m, x: (x := x + 0, h := x.mul_(2.0), m.layer(x) + m.b(m.a(h)))[2], "in place"),
    "gradients off": (lambda m, x: (y := m.layer(x), no_gradients(x), y + m.b(m.a(x)))[2], "switches gradients"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_places_that_only_look_alike_are_left_alone(name: str) -> None:
    combine, reason = REFUSED[name]
    gm = torch.fx.symbolic_trace(Adapted(combine).eval())
    code = gm.code
    MergeLora()(gm)
    assert gm.code == code and not refold.history(gm)
    assert any(re.search(reason, refused.reason) for refused in refold.result(gm).refused)


def test_scaling_in_place_of_its_own_results() -> None:
    gm = torch.fx.symbolic_trace(Adapted(lambda m, x: m.layer(x) + m.b(m.a(x).mul_(3.0)).mul_(2.0)).eval().double())
    original, x = copy.deepcopy(gm), torch.randn(5, 24, dtype=torch.float64)
    MergeLora()(gm)
    assert len(refold.result(gm).rewritten) == 1
    assert torch.allclose(gm(x), original(x))


@pytest.mark.parametrize("between", ["drop", "identity"])
def test_hooks_and_subclasses_between_are_left_alone(between: str) -> None:
    class Loud(nn.Dropout):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 3

    for odd in (nn.Identity(), nn.Dropout(0.3), Loud()):
        model = Adapted(lambda m, x: m.layer(x) + m.b(m.a(getattr(m, between)(x)))).eval().double()
        setattr(model, between, odd.eval())
        if not isinstance(odd, Loud):
            odd.register_forward_hook(lambda module, args, output: output * 3)
        gm = torch.fx.GraphModule(model, Leaves().trace(model))
        original, x = copy.deepcopy(gm), torch.randn(5, 24, dtype=torch.float64)
        MergeLora()(gm)
        assert torch.equal(gm(x), original(x)) and not refold.history(gm)
        assert re.search(r"left alone: (hooks|it is a Loud)", str(refold.result(gm)))


class Leaves(torch.fx.Tracer):
    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        return True


def test_another_input_is_no_adapter() -> None:
    gm = torch.fx.symbolic_trace(Adapted(lambda m, x: m.layer(x) + m.b(m.a(x + 1))).eval())
    MergeLora()(gm)
    assert not refold.history(gm)


def test_active_dropout_and_adapter_bias_are_refused() -> None:
    gm = torch.fx.symbolic_trace(Adapted(FORMS["idle dropout"]).train())
    MergeLora()(gm)
    assert "call eval() first" in str(refold.result(gm)) and not refold.history(gm)
    model = Adapted(FORMS["layer first"]).eval()
    model.b = nn.Linear(3, 16)
    gm = torch.fx.symbolic_trace(model)
    MergeLora()(gm)
    assert "its adapter has a bias" in str(refold.result(gm))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_hundred_rounds_change_no_bit(dtype: torch.dtype) -> None:
    gm = traced("layer first", dtype)
    gm.layer.weight.data[0, :4] = torch.tensor([0.0, -0.0, 1e-7, 6e-5]).to(dtype)
    before = copy.deepcopy(gm)
    for _ in range(100):
        MergeLora()(gm, lint_and_recompile=False)
        assert refold.history(gm)
        refold.undo(gm, lint_and_recompile=False)
    assert_restored(gm, before)


def test_adapters_are_swapped_by_undo_and_by_checkpoint() -> None:
    gm = traced("layer first", torch.bfloat16)
    before = copy.deepcopy(gm)
    other = {"a.weight": torch.randn(3, 24).bfloat16(), "b.weight": torch.randn(16, 3).bfloat16()}
    by_hand = copy.deepcopy(gm)
    by_hand.load_state_dict(other, strict=False)
    MergeLora()(by_hand)
    MergeLora()(gm)
    assert not same_bits(gm.layer.weight, by_hand.layer.weight)
    load_original_state_dict(gm, other, strict=False)  # while merged
    assert same_bits(gm.layer.weight, by_hand.layer.weight)
    load_original_state_dict(gm, before.state_dict())
    refold.undo(gm)
    assert_restored(gm, before)


def test_weights_trained_while_merged_come_back() -> None:
    gm = traced("layer first", torch.float64)
    before = copy.deepcopy(gm)
    MergeLora()(gm)
    with torch.no_grad():
        gm.layer.weight[3, 5] += 1
    merged = gm.layer.weight.detach().clone()
    refold.undo(gm)
    change = gm.layer.weight.detach() - before.layer.weight
    assert abs(float(change[3, 5]) - 1) <= 4 * torch.finfo(torch.float64).eps
    change[3, 5] = 0
    assert not change.any(), "weights that were not trained came back with other bits"
    MergeLora()(gm)
    assert torch.equal(gm.layer.weight, merged)


def test_gradients_of_the_adapter_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adapted, "forward", lambda self, x: self.combine(self, x))
    gm = traced("torch.add", torch.float64)
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():  # whole numbers and a factor of 2: every sum is exact in any order
        for parameter in gm.parameters():
            parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=numbers))
    reference = copy.deepcopy(gm)
    x = torch.randint(-3, 4, (5, 24), generator=numbers).double()
    reference(x).square().sum().backward()
    MergeLora()(gm)
    gm(x).square().sum().backward()
    refold.undo(gm)
    for name, parameter in reference.named_parameters():
        found = dict(gm.named_parameters())[name].grad
        assert found is not None and torch.equal(found, parameter.grad) and found.any(), name


def test_the_correction_is_small() -> None:
    torch.manual_seed(0)
    model = Adapted(FORMS["layer first"])
    model.layer, model.a, model.b = nn.Linear(256, 256), nn.Linear(256, 8, bias=False), nn.Linear(8, 256, bias=False)
    for dtype, limit in ((torch.float32, 0.03), (torch.bfloat16, 0.06), (torch.float16, 0.10)):
        gm = torch.fx.symbolic_trace(copy.deepcopy(model).eval().to(dtype))
        nn.init.normal_(gm.b.weight, std=0.02)
        MergeLora()(gm)
        record = refold.history(gm)[0].maps[0]
        held = sum(correction.nbytes for correction in record.corrections.values())
        assert held <= limit * gm.layer.weight.numel() * gm.layer.weight.element_size(), dtype


def test_a_captured_peft_model() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0", "2"], lora_dropout=0.1, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval().double()
    x = torch.randn(3, 8, dtype=torch.float64)
    from refold.capture.tracing import trace

    gm = trace(adapted, x)
    before = {name: tensor.clone() for name, tensor in gm.state_dict().items()}
    reference = copy.deepcopy(gm)
    MergeLora()(gm)
    assert len(refold.result(gm).rewritten) == 2
    assert not any("lora" in name for name in gm.state_dict())
    assert not list(deviations(reference, gm, (x,)))
    refold.undo(gm)
    assert all(same_bits(tensor, before[name]) for name, tensor in gm.state_dict().items())
