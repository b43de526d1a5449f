"""torch.compile(model, backend="refold"): rewritten, handed to inductor, and never stale."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from refold.extension import compile_backend as backend
from refold.record.stack import history


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q(x) * self.k(x), self.norm(self.conv(image)).relu()


class Graphs(list):
    """Graphs, and the settings that the last of them came with."""

    settings: dict[str, object]


@pytest.fixture
def spied(monkeypatch):
    """The graphs that are handed over to inductor, which is left out: it is not what is tested."""
    graphs = Graphs()

    def keep(gm, inputs, settings):
        graphs.append(gm)
        graphs.settings = settings
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


def test_a_mode_and_options_are_handed_over_to_inductor(spied):
    net, x, image = make()
    with torch.no_grad():
        torch.compile(net, backend="refold", mode="max-autotune-no-cudagraphs")(x, image)
        assert spied.settings == torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
        torch._dynamo.reset()
        torch.compile(net, backend="refold", options={"epilogue-fusion": False})(x, image)
        assert spied.settings == {"epilogue_fusion": False}
        torch._dynamo.reset()
        with pytest.raises(Exception, match="Unexpected optimization option epilog"):
            torch.compile(net, backend="refold", options={"epilog": False})(x, image)


def test_one_dynamic_graph_runs_every_size(spied):
    net, *_ = make()
    with torch.no_grad():
        compiled = torch.compile(net, backend="refold", dynamic=True)
        for n, side in ((2, 6), (3, 7), (5, 9)):
            x, image = torch.randn(n, 8).double(), torch.randn(n, 3, side, side).double()
            assert same(compiled(x, image), net(x, image))
    assert len(spied) == 1
    assert "MergeLinears" in {change.name for change in history(spied[0])}


@pytest.mark.slow
def test_the_whole_way_through_inductor():
    net, x, image = make()
    reference = copy.deepcopy(net)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(net, backend="refold", options={"epilogue_fusion": False}, dynamic=True)
        assert same(compiled(x, image), reference(x, image))
        assert same(compiled(x[:1], image[:1]), reference(x[:1], image[:1]))
