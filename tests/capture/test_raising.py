"""ATen ops back to module calls: split subclasses, inlined regions, writes in place, and what stays as it is."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from capture_models import IDS, Block, seeded, targets
from torch import fx, nn

import refold
from refold.capture.tracing import (
    capture_report,
    trace,
)
from refold.verification.verifier import verify_last


class Scaled(nn.Embedding):
    """A subclass that does its base's op and something more."""

    def __init__(self) -> None:
        super().__init__(10, 4)
        self.register_buffer("factor", torch.tensor(3.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.factor


class NormAct(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(super().forward(x))


class HoldsItsActivation(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: the activation is a child of the norm."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.drop = nn.Identity()
        self.act = nn.Hardswish()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(super().forward(x)))


class Standardized(nn.Conv2d):
    """A subclass whose op does not read its own weight as it is: it is not split."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight - self.weight.mean()
        return nn.functional.conv2d(x, weight, self.bias, self.stride, self.padding)


def test_a_subclass_is_split_into_its_base_class_and_the_rest() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), NormAct(4), Standardized(4, 4, 1)).eval()
    x = seeded(2, 3, 5, 5)
    captured = trace(model, x)
    report = capture_report(captured)
    assert report.split == ("1",)
    base = captured.get_submodule("1")
    assert type(base) is nn.BatchNorm2d and base.weight is model[1].weight
    assert torch.ops.aten.relu.default in targets(captured.graph, "call_function")
    assert torch.ops.aten.conv2d.default in targets(captured.graph, "call_function")
    assert list(captured.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        assert torch.equal(captured(x), model(x))

    embedding = nn.Sequential(Scaled(), nn.Linear(4, 4)).eval()
    captured = trace(embedding, IDS)
    assert type(captured.get_submodule("0")) is nn.Embedding
    assert list(captured.state_dict()) == list(embedding.state_dict())
    with torch.no_grad():
        assert torch.equal(captured(IDS), embedding(IDS))


def test_a_norm_that_holds_its_activation_is_split_folded_and_restored(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), HoldsItsActivation(4), nn.Conv2d(4, 2, 1)).eval()
    model[1].running_mean.normal_()
    reference, x = copy.deepcopy(model), seeded(2, 3, 5, 5)
    captured = trace(model, x)
    assert capture_report(captured).split == ("1",)
    base = captured.get_submodule("1")
    assert type(base) is nn.BatchNorm2d and base.weight is model[1].weight and not list(base.children())
    assert [r.path for r in capture_report(captured).refused] == ["1.act"]
    assert list(captured.state_dict()) == list(model.state_dict())
    code = captured.code

    refold.FuseBatchNorm2dInConv2d()(captured)
    assert targets(captured.graph, "call_module") == ["0", "2"]
    with torch.no_grad():
        assert verify_last(captured, (x,))
    refold.save(captured, tmp_path / "folded")
    loaded = refold.load(tmp_path / "folded", graph_module=trace(copy.deepcopy(reference), x))
    for graph in (captured, loaded):
        refold.undo(graph)
        with torch.no_grad():
            assert graph.code == code and torch.equal(graph(x), reference(x))


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 4)
        self.outside = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            frozen = self.inside(x)
        with torch.autocast("cpu", enabled=False):
            return self.outside(frozen) * x


def test_regions_are_inlined_and_no_grad_still_means_it() -> None:
    model = Regions().eval()
    x = seeded(2, 4)
    captured = trace(model, x)
    assert not any("wrap_with" in str(node.target) for node in captured.graph.nodes)
    assert capture_report(captured).raised == ("inside", "outside")
    reference = copy.deepcopy(model)
    reference(x).sum().backward()
    captured(x).sum().backward()
    assert captured.inside.weight.grad is None and reference.inside.weight.grad is None
    assert torch.equal(captured.outside.weight.grad, reference.outside.weight.grad)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
        return y.float() + 1


def test_an_enabled_autocast_keeps_its_meaning() -> None:
    model = Autocast().eval()
    x = seeded(2, 4)
    captured = trace(model, x)
    with torch.no_grad():
        assert torch.equal(captured(x), model(x))
        assert not torch.equal(captured(x), model.linear(x) + 1), "it really ran in bfloat16"


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


def test_what_cannot_be_raised_stays_and_is_named() -> None:
    model = Recurrent().eval()
    captured = trace(model, seeded(2, 3, 4))
    report = capture_report(captured)
    assert [r.path for r in report.refused] == ["lstm"] and not report.complete
    assert "lstm (LSTM)" in str(report)
    assert list(captured.state_dict()) == list(model.state_dict())
    assert captured.lstm.weight_ih_l0 is model.lstm.weight_ih_l0


class Two(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Two:
        y = self.linear(x)
        z = y + 1
        self.relu(y)
        y.add_(z)
        return Two(y, z)


def test_writes_in_place_keep_their_order() -> None:
    model = InPlace().eval()
    captured = trace(model, seeded(2, 4))
    result, expected = captured(seeded(2, 4)), copy.deepcopy(model)(seeded(2, 4))
    assert type(result) is Two
    assert torch.equal(result.one, expected.one) and torch.equal(result.other, expected.other)


def test_a_traced_module_of_the_users_own_can_be_captured_again() -> None:
    model = Block().eval()
    captured = trace(fx.symbolic_trace(model), seeded(2, 4))
    assert capture_report(captured).raised == ("linear", "norm")


def test_raising_is_cheap_and_copies_no_weights() -> None:
    model = nn.Sequential(*(Block() for _ in range(20))).eval()
    shares = []
    for _ in range(3):  # the garbage of other tests may be collected in the middle of one
        captured = trace(model, seeded(2, 4))
        seconds = capture_report(captured).seconds
        shares.append(seconds["raise"] / seconds["export"])
    assert min(shares) < 0.2
    assert {p.data_ptr() for p in captured.parameters()} == {p.data_ptr() for p in model.parameters()}
