"""ChannelsLast changes the order in memory and nothing else, and gives the strides back."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

import refold
from refold import examples
from refold.transformations.channels_last import ChannelsLast


@pytest.mark.parametrize("make", [examples.images, examples.exported_images])
def test_layout_and_values(make):
    model, (x,) = make()
    model, x = model.double(), x.double()
    gm = model if isinstance(model, torch.fx.GraphModule) else symbolic_trace(model)
    original, code = copy.deepcopy(gm), gm.code
    ChannelsLast()(gm)
    convs = [p for n, p in gm.named_parameters() if p.dim() == 4]
    assert len(convs) == 2 and all(p.is_contiguous(memory_format=torch.channels_last) for p in convs)
    entries = [n for n in gm.graph.nodes if n.kwargs.get("memory_format") is torch.channels_last]
    assert len(entries) == 1
    for (name, old), (_, new) in zip(original.named_parameters(), gm.named_parameters(), strict=True):
        assert torch.equal(old, new), name
    for expected, found in zip(original(x), gm(x), strict=True):
        assert torch.allclose(expected, found, rtol=1e-12, atol=1e-12) and found.is_contiguous()
    strides = {name: p.stride() for name, p in original.named_parameters()}
    ChannelsLast()(gm, reverse=True)
    assert gm.code == code
    assert {name: p.stride() for name, p in gm.named_parameters()} == strides


def test_strides_come_back_when_the_originals_are_gone():
    gm = symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU()))
    values = gm.get_parameter("0.weight").detach().clone()
    ChannelsLast()(gm)
    gc.collect()
    twin = copy.deepcopy(gm)
    refold.undo(twin)
    assert twin.get_parameter("0.weight").stride() == values.stride()
    assert torch.equal(twin.get_parameter("0.weight"), values)


def test_training_while_laid_out_comes_back():
    gm = symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))
    ChannelsLast()(gm)
    with torch.no_grad():
        gm.get_parameter("0.weight").add_(1)
    x = torch.randn(1, 3, 5, 5)
    expected = gm(x)
    refold.undo(gm)
    assert torch.allclose(gm(x), expected, rtol=1e-5, atol=1e-6)


def test_views_become_reshapes_and_strides_are_refused():
    class Viewed(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.conv, self.function = nn.Conv2d(3, 4, 3), function

        def forward(self, x):
            return self.function(self.conv(x).relu())

    x = torch.randn(2, 3, 5, 5)
    gm = symbolic_trace(Viewed(lambda y: y.view(2, -1)))
    expected = gm(x)
    ChannelsLast()(gm)
    assert refold.history(gm) and torch.allclose(gm(x), expected, rtol=1e-5, atol=1e-6)
    gm = symbolic_trace(Viewed(lambda y: y.as_strided((2, 2), (1, 1))))
    ChannelsLast()(gm)
    assert not refold.history(gm) and "memory layout" in refold.result(gm).refused[0].reason


def test_what_leaves_in_a_container():
    class Container(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            y = self.conv(x)
            return {"parts": y.chunk(2, 1), "whole": y}

    gm = symbolic_trace(Container())
    x = torch.randn(2, 3, 5, 5)
    expected = gm(x)
    ChannelsLast()(gm)
    assert refold.history(gm)
    assert torch.allclose(gm(x)["whole"], expected["whole"], rtol=1e-5, atol=1e-6) and gm(x)["whole"].is_contiguous()
    assert torch.allclose(torch.cat(gm(x)["parts"], 1), expected["whole"], rtol=1e-5, atol=1e-6)


def test_nothing_to_do():
    gm = symbolic_trace(nn.Sequential(nn.Conv2d(1, 4, 1), nn.Linear(3, 3)))
    ChannelsLast()(gm)
    assert not refold.history(gm)
