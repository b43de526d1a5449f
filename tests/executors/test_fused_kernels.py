"""Layers and the activations behind them become one call each, where nothing else sees what is between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule

import refold
from refold.executors import PreparationFailed, executor_named, fused_convolution
from refold.executors.fused_convolution import convolution_relu
from refold.executors.fused_kernels import with_fused_kernels
from refold.executors.fused_linear import linear_activation
from refold.executors.torch_compile import Compile

IMAGE, ROWS = torch.randn(2, 4, 6, 6), torch.randn(3, 5, 4)


class Apply(nn.Module):
    """Two convolutions, two linear layers, and a function of them and the input."""

    def __init__(self, function: Any, **settings: Any) -> None:
        super().__init__()
        self.a = nn.Conv2d(4, 4, 3, padding=1, **settings)
        self.b = nn.Conv2d(4, 4, 1, bias=False)
        self.wide, self.narrow = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)
        self.weight, self.bias = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(8))
        self.act, self.gelu = nn.ReLU(), nn.GELU(approximate="tanh")
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def add_in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.a(x)
    y += x
    return m.act(y)


def rows_of_a_matrix(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.addmm(m.bias, x.view(-1, 4), m.weight).view(3, 5, 8)
    return F.gelu(y, approximate="tanh").view(-1, 8).sum(0)


FUSED: dict[str, tuple[Any, torch.Tensor, int]] = {
    "convolution, ReLU": (lambda m, x: m.act(m.a(x)), IMAGE, 1),
    "convolution, ReLU in place": (lambda m, x: F.relu(m.a(x), inplace=True), IMAGE, 1),
    "convolution without bias": (lambda m, x: torch.relu(m.b(x)), IMAGE, 1),
    "a residual": (lambda m, x: m.act(m.a(x) + x), IMAGE, 1),
    "a residual first": (lambda m, x: m.act(x + m.a(x)), IMAGE, 1),
    "a residual in place": (add_in_place, IMAGE, 1),
    "two convolutions added": (lambda m, x: m.act(m.a(x) + m.b(x)), IMAGE, 1),
    "one behind the other": (lambda m, x: m.act(m.b(y := m.act(m.a(x) + x)) + y), IMAGE, 2),
    "linear, ReLU": (lambda m, x: m.act(m.wide(x)), ROWS, 1),
    "linear, GELU": (lambda m, x: m.gelu(m.wide(x)), ROWS, 1),
    "linear without bias": (lambda m, x: m.act(m.narrow(m.act(m.wide(x)))), ROWS, 2),
    "rows of a matrix": (rows_of_a_matrix, ROWS, 1),
    "both kinds": (lambda m, x: m.act(m.narrow(m.act(m.wide(m.act(m.a(x)).mean((2, 3)))))), IMAGE, 3),
}


def writes_between(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    y = m.a(x)
    x.mul_(2)
    return m.act(y) + x


def adds_into_the_residual(m: Any, x: torch.Tensor) -> torch.Tensor:
    shortcut = x.clone()
    return m.act(shortcut.add_(m.a(x))) + shortcut


LEFT_ALONE: dict[str, tuple[Any, torch.Tensor]] = {
    "others read the convolution": (lambda m, x: m.act(y := m.a(x)) + y, IMAGE),
    "others read the sum": (lambda m, x: m.act(y := m.a(x) + x) + y, IMAGE),
    "others read the layer": (lambda m, x: m.act(y := m.wide(x)) + y, ROWS),
    "a write between": (writes_between, IMAGE),
    "added into the residual": (adds_into_the_residual, IMAGE),
    "added to itself": (lambda m, x: m.act(torch.add(y := m.a(x), y)), IMAGE),
    "added twice": (lambda m, x: m.act(torch.add(m.a(x), x, alpha=2)), IMAGE),
    "a smaller residual": (lambda m, x: m.act(m.a(x) + x[:1]), IMAGE),
    "a number": (lambda m, x: m.act(m.a(x) + 1), IMAGE),
    "exact GELU": (lambda m, x: F.gelu(m.wide(x)), ROWS),
    "another activation": (lambda m, x: F.relu6(m.a(x)), IMAGE),
    "an image without a batch": (lambda m, x: m.act(m.a(x)), IMAGE[0]),
    "a vector": (lambda m, x: m.act(m.wide(x)), ROWS[0, 0]),
    "other numbers in the same bits": (lambda m, x: m.act(m.wide(x).view(torch.int32)), ROWS),
}


def captured(function: Any, x: torch.Tensor, **settings: Any) -> GraphModule:
    return refold.trace(Apply(function, **settings).eval().requires_grad_(False), x, dynamic=False)


def fused_calls(gm: GraphModule) -> int:
    return sum("refold." in str(node.target) for node in gm.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("name", FUSED)
def test_one_call_computes_layer_and_activation(name: str) -> None:
    function, x, calls = FUSED[name]
    gm = captured(function, x)
    code, exact = gm.code, copy.deepcopy(gm).double()(x.double())
    lowered = with_fused_kernels(gm)
    assert fused_calls(lowered) == calls and gm.code == code, "the graph itself stays as it is"
    torch.testing.assert_close(lowered(x).double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_seen_elsewhere_or_something_else_is_left_alone(name: str) -> None:
    with pytest.raises(PreparationFailed, match="No layer is followed by"):
        with_fused_kernels(captured(*LEFT_ALONE[name]))


@pytest.mark.parametrize("settings", [{"groups": 2}, {"padding_mode": "reflect"}])
def test_convolutions_that_have_no_such_kernel(settings: dict[str, Any]) -> None:
    with pytest.raises(PreparationFailed):
        with_fused_kernels(captured(FUSED["convolution, ReLU"][0], IMAGE, **settings))


def test_a_geometry_that_the_library_refuses_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_residuals(*args: Any) -> torch.Tensor:
        if args[3] is not None:
            raise RuntimeError("no engine for this")
        return convolution_relu(*args)

    monkeypatch.setattr(fused_convolution, "convolution_relu", refuse_residuals)
    lowered = with_fused_kernels(captured(lambda m, x: m.act(m.b(y := m.act(m.a(x))) + y), IMAGE))
    assert fused_calls(lowered) == 1


def test_only_graphs_can_be_looked_into() -> None:
    with pytest.raises(PreparationFailed, match="captured graph"):
        with_fused_kernels(nn.ReLU())


def test_weights_written_later_are_followed() -> None:
    gm = captured(FUSED["both kinds"][0], IMAGE)
    lowered = with_fused_kernels(gm)
    with torch.no_grad():
        for weight in gm.parameters():
            weight.mul_(1.5)
    torch.testing.assert_close(lowered(IMAGE), gm(IMAGE))


@pytest.mark.parametrize("name", ["one behind the other", "both kinds", "rows of a matrix"])
def test_compiled(name: str) -> None:
    function, x, _ = FUSED[name]
    gm = captured(function, x)
    run = Compile("fused", lower=with_fused_kernels).prepare(gm, (x,), {})
    with torch.no_grad():
        torch.testing.assert_close(run(x), gm(x))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_the_convolution_is_an_operator_as_torch_wants_it(residual: bool, channels_last: bool) -> None:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x, weight = IMAGE.to(memory_format=layout), torch.randn(4, 4, 3, 3)
    args = (x, weight, torch.randn(4), torch.randn(2, 4, 3, 3) if residual else None, [2, 2], [1, 1], [1, 1])
    torch.library.opcheck(convolution_relu, args)


@pytest.mark.parametrize("gelu", [False, True])
def test_the_layer_is_an_operator_as_torch_wants_it(gelu: bool) -> None:
    torch.library.opcheck(linear_activation, (ROWS, torch.randn(6, 4).t(), torch.randn(6), gelu))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUSED)
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    function, x, _ = FUSED[name]
    model = Apply(function).cuda().to(dtype).eval().requires_grad_(False)
    x = x.cuda().to(dtype)
    gm = refold.trace(model, x, dynamic=False)
    run = executor_named("compile-fused+cuda_graph").prepare(gm, (x,), {})
    exact = copy.deepcopy(model).double()(x.double())
    loose = 4 * torch.finfo(torch.bfloat16 if dtype is torch.bfloat16 else torch.float16).eps  # TF32 for float32
    with torch.no_grad():
        torch.testing.assert_close(run(x).double(), exact, atol=20 * loose, rtol=loose)
