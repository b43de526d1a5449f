"""While a call runs, weights that can be computed again give their memory up, and nobody ever notices."""

from __future__ import annotations

import copy
import gc
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import refold
from refold.fingerprint import same_bits
from refold.record.released import ReleasedMemory


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(64, 64, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.Conv2d(64, 64, 3, bias=False),
        nn.BatchNorm2d(64),
    ]
    with torch.no_grad():
        for norm in layers[1::2]:
            norm.running_var.uniform_(0.5, 2)
            norm.running_mean.normal_()
            norm.weight.normal_()
    return nn.Sequential(*layers).eval()


@pytest.fixture
def gm() -> torch.fx.GraphModule:
    traced = torch.fx.symbolic_trace(model())
    gc.collect()
    return traced


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of the weights whose memory was given up."""
    found: list[torch.Size] = []
    real = ReleasedMemory.release

    def release(self: ReleasedMemory, tensor: torch.Tensor, compute: Any) -> None:
        size = tensor.untyped_storage().nbytes()
        real(self, tensor, compute)
        if tensor.untyped_storage().nbytes() < size:
            found.append(tensor.shape)

    monkeypatch.setattr(ReleasedMemory, "release", release)
    return found


def assert_original(gm: nn.Module) -> None:
    for name, tensor in model().state_dict().items():
        assert same_bits(gm.state_dict()[name], tensor), name


def test_memory_is_given_up_in_both_directions(gm: torch.fx.GraphModule, released: list[torch.Size]) -> None:
    refold.FuseBatchNorm2dInConv2d()(gm)
    assert released == [(64, 64, 3, 3)] * 2
    released.clear()
    refold.undo(gm)
    assert released == [(64, 64, 3, 3)] * 2
    assert_original(gm)


def test_not_while_somebody_else_holds_the_weights(released: list[torch.Size]) -> None:
    eager = model()
    gm = torch.fx.symbolic_trace(eager)
    refold.FuseBatchNorm2dInConv2d()(gm)
    assert not released
    assert_original(eager)
    gm = torch.fx.symbolic_trace(model())
    optimizer = torch.optim.SGD(gm.parameters(), lr=1.0)
    refold.FuseBatchNorm2dInConv2d()(gm)
    assert not released
    assert same_bits(optimizer.param_groups[0]["params"][0], model()[0].weight)


class Failing(refold.FuseBatchNorm2dInConv2d):
    """Fails at its second site, when two weights are gone."""

    sites: ClassVar[list[Any]] = []

    def rewrite(self, site: Any, edit: Any) -> None:
        super().rewrite(site, edit)
        self.sites.append(site)
        if len(self.sites) == 2:
            raise MemoryError


def test_a_call_that_fails_fills_them_again(gm: torch.fx.GraphModule, released: list[torch.Size]) -> None:
    parameters, code = {n: id(p) for n, p in gm.named_parameters()}, gm.code
    with pytest.raises(MemoryError):
        Failing()(gm)
    assert len(released) == 2 and gm.code == code and not refold.history(gm)
    assert parameters == {n: id(p) for n, p in gm.named_parameters()}
    assert_original(gm)


class Grabbing(refold.FuseBatchNorm2dInConv2d):
    """Keeps what it saw."""

    tensors: ClassVar[list[torch.Tensor]] = []
    modules: ClassVar[list[nn.Module]] = []

    def rewrite(self, site: Any, edit: Any) -> None:
        conv = site.detail.layer
        (self.tensors if self.tensors == [] else self.modules).append(
            conv.weight if self.tensors == [] else edit.gm.get_submodule(conv.path)
        )
        super().rewrite(site, edit)


def test_whoever_took_hold_of_one_meanwhile_gets_it_filled(
    gm: torch.fx.GraphModule, released: list[torch.Size]
) -> None:
    Grabbing()(gm)
    assert len(released) == 2
    expected = model()
    assert same_bits(Grabbing.tensors[0], expected[0].weight)
    assert same_bits(Grabbing.modules[0].weight, expected[2].weight)
    refold.undo(gm)
    assert_original(gm)


class Leaving(refold.Transformation):
    """States a map and then leaves the old weight where it is."""

    def transform(self, graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        from refold.rewrite.editor import Editor
        from refold.weights import Scale

        graph_module.register_buffer("scale", torch.rand(64) + 0.5)
        edit = Editor(graph_module)
        new = edit.map_weights(Scale(0), {"weight": "0.weight", "scale": "scale"}, {"weight": "scaled"})
        graph_module.register_parameter("scaled", nn.Parameter(new["weight"]))
        return graph_module


def test_a_weight_that_stays_in_use_is_filled(gm: torch.fx.GraphModule, released: list[torch.Size]) -> None:
    Leaving()(gm)
    assert len(released) == 1
    assert same_bits(gm.get_parameter("0.weight"), model()[0].weight)


def test_a_composition_and_a_copy(gm: torch.fx.GraphModule) -> None:
    refold.compose(refold.FuseBatchNorm2dInConv2d(), refold.MergeLinears())(gm)
    clone = copy.deepcopy(gm)
    for module in (gm, clone):
        refold.undo(module, None)
        assert_original(module)
