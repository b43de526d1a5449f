"""torch.compile(model, backend="refold"): rewritten, handed to inductor, and never stale."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import refold.compile_backend as backend
from refold.history import history


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q(x) * self.k(x), self.norm(self.conv(image)).relu()


@pytest.fixture
def spied(monkeypatch):
    """The graphs that are handed over to inductor, which is left out: it is not what is tested."""
    graphs = []

    def keep(gm, inputs, options):
        graphs.append(gm)
        return gm

    monkeypatch.setattr(backend, "_inductor", keep)
    torch._dynamo.reset()
    yield graphs
    torch._dynamo.reset()


def make() -> tuple[Net, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    net = Net().double().eval()
    with torch.no_grad():
        net.norm.running_mean.normal_()
        net.norm.running_var.uniform_(0.5, 2)
    return net, torch.randn(2, 8).double(), torch.randn(2, 3, 6, 6).double()


def same(a, b) -> bool:
    """Equal but for the rounding of sums of at most 27 products and a fold."""
    steps = 2 * (27 + 8) * torch.finfo(torch.float64).eps
    return all(bool(((x - y).abs() <= steps * (1 + y.abs().max())).all()) for x, y in zip(a, b, strict=True))


def test_it_is_found_by_name():
    assert "refold" in torch._dynamo.list_backends(exclude_tags=())


def test_weights_are_rewritten_without_gradients(spied):
    net, x, image = make()
    reference = copy.deepcopy(net)
    with torch.no_grad():
        out = torch.compile(net, backend=backend.refold_backend)(x, image)
        assert same(out, reference(x, image))
    names = {change.name for change in history(spied[0])}
    assert {"MergeLinears", "FoldBatchNorm"} <= names


def test_weights_changed_later_are_seen(spied):
    net, x, image = make()
    with torch.no_grad():
        compiled = torch.compile(net, backend=backend.refold_backend)
        compiled(x, image)
        net.q.weight.add_(1.0)
        net.norm.weight.mul_(2.0)
        assert same(compiled(x, image), copy.deepcopy(net)(x, image))


def test_training_goes_on_with_the_original_weights(spied):
    net, x, image = make()
    reference = copy.deepcopy(net)
    compiled = torch.compile(net, backend=backend.refold_backend)
    sum(part.sum() for part in compiled(x, image)).backward()
    sum(part.sum() for part in reference(x, image)).backward()
    for mine, its in zip(net.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)


@pytest.mark.slow
def test_the_whole_way_through_inductor():
    net, x, image = make()
    reference = copy.deepcopy(net)
    torch._dynamo.reset()
    with torch.no_grad():
        out = torch.compile(net, backend="refold")(x, image)
        assert same(out, reference(x, image))
