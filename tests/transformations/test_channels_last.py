"""ChannelsLast changes the order in memory and nothing else, and gives the strides back."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

import refold
from refold.examples import layers
from refold.transformations.channels_last import ChannelsLast


def is_entry(node):
    """Where an image is laid out: at once, or axis by axis where its rank is not known."""
    return node.kwargs.get("memory_format") is torch.channels_last or (node.target == "movedim" and node.args[1] == -1)


@pytest.mark.parametrize("make", [layers.images, layers.exported_images])
def test_layout_and_values(make):
    model, (x,) = make()
    model, x = model.double(), x.double()
    gm = model if isinstance(model, torch.fx.GraphModule) else symbolic_trace(model)
    original, code = copy.deepcopy(gm), gm.code
    ChannelsLast()(gm)
    convs = [p for n, p in gm.named_parameters() if p.dim() == 4]
    assert len(convs) == 2 and all(p.is_contiguous(memory_format=torch.channels_last) for p in convs)
    assert len([n for n in gm.graph.nodes if is_entry(n)]) == 1
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


class Image(nn.Module):
    """A convolution, and something done with its input and its output."""

    def __init__(self, do):
        super().__init__()
        self.conv, self.do = nn.Conv2d(3, 4, 3, padding=1), do

    def forward(self, x):
        return self.do(x, self.conv)


def written_image(x, conv):
    x = x * 1.5
    y = conv(x)
    x.add_(1)
    return y, x


def written_argument(x, conv):
    y = conv(x)
    x.add_(1)
    return y, x.sin()


def written_before_it_is_read(x, conv):
    x = x * 1.5
    seen = x.sin()
    x.add_(1)
    return conv(x), seen, x.cos()


def viewed(x, conv):
    return conv(x), x.view(x.size(0), -1), x.relu().view(x.size(0), -1)


def strided(x, conv):
    return conv(x), x.as_strided((4,), (1,)), x.stride(1) * x


def sizes_by_name(x, conv):
    y = conv(x).relu()
    return y.view(size=(2, -1)), y


def flat_and_viewed(x, conv):
    return conv(x).flatten(2).view(2, -1), x


def written_alone(x, conv):
    rows = conv(x).flatten(1)
    rows.relu_()
    return rows.view(2, -1), x


RUNS = {
    do.__name__: do
    for do in (
        written_image, written_argument, written_before_it_is_read, viewed, strided, sizes_by_name, flat_and_viewed,
        written_alone,
    )
}  # fmt: skip


def through_a_view(x, conv):
    y = conv(x)
    y.view(y.size(0), -1).add_(1)
    return y, x


def through_a_reshape(x, conv):
    y = conv(x)
    y.reshape(2, -1).add_(1)
    return y.sin(), x


def through_the_image(x, conv):
    y = conv(x)
    rows = y.flatten(1)
    y.add_(1)
    return rows, x


def of_a_copy(x, conv):
    y = conv(x)
    y.permute(0, 2, 3, 1).contiguous().add_(1)
    return y.sin(), x


def as_other_numbers(x, conv):
    return conv(x).view(torch.int64), x


def added_one(y):
    return y.add_(1)


torch.fx.wrap("added_one")


def by_others(x, conv):
    y = conv(x)
    return added_one(y), y.sin()


REFUSED = {
    "through_a_view": (through_a_view, "writes into"),
    "through_a_reshape": (through_a_reshape, "writes into"),
    "through_the_image": (through_the_image, "writes into"),
    "of_a_copy": (of_a_copy, "writes into"),
    "as_other_numbers": (as_other_numbers, "memory layout"),
    "by_others": (by_others, "writes into"),
}


def laid_out(do, x, captured):
    """The graph laid out otherwise; it gives what a copy of the model gives, and leaves the same in its argument."""
    torch.manual_seed(0)
    model = Image(do).double()
    reference, (mine, other) = copy.deepcopy(model), (x.clone(), x.clone())
    gm = refold.trace(model, x.clone()) if captured else symbolic_trace(model)
    ChannelsLast()(gm)
    with torch.no_grad():
        for expected, found in zip(reference(other), gm(mine), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(mine, other)
    return gm


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_writes_and_views_that_do_not_matter(name, captured):
    if name == "strided" and captured:
        pytest.skip("a stride is a number for capture")
    gm = laid_out(RUNS[name], torch.randn(2, 3, 8, 8, dtype=torch.float64), captured)
    assert refold.history(gm) and any(map(is_entry, gm.graph.nodes)), refold.result(gm)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_shares_memory_by_its_layout_is_refused(name, captured):
    do, reason = REFUSED[name]
    if name == "by_others" and captured:
        pytest.skip("capture looks into functions of the author")
    gm = laid_out(do, torch.randn(2, 3, 8, 8, dtype=torch.float64), captured)
    assert not refold.history(gm) and reason in str(refold.result(gm))


def test_an_image_without_a_batch():
    def plain(x, conv):
        return conv(x).relu(), x

    x = torch.randn(3, 8, 8, dtype=torch.float64)
    gm = laid_out(plain, x, captured=False)
    assert refold.history(gm) and torch.equal(gm(x)[1], x)
    gm = laid_out(plain, x, captured=True)
    assert not refold.history(gm) and "no batch dimension" in str(refold.result(gm))


def test_a_module_that_gives_several_values():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.lstm = nn.Conv2d(3, 4, 3, padding=1), nn.LSTM(64, 5, batch_first=True)

        def forward(self, x):
            return self.lstm(self.conv(x).flatten(2))

    model, x = Recurrent(), torch.randn(2, 3, 8, 8)
    gm = ChannelsLast()(symbolic_trace(model))
    assert refold.history(gm)
    torch.testing.assert_close(gm(x)[0], copy.deepcopy(model)(x)[0])
