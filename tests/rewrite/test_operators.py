"""Operators: a call is the same whatever its form, with all settings, one value for each axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node, symbolic_trace

from refold.examples import exported
from refold.graph.view import Call, GraphView
from refold.rewrite import AVERAGE_POOL, BATCH_NORM, CONVOLUTION, DROPOUT, LINEAR, PAD, Operator, Refuse, attempt, holds

IMAGE = torch.randn(2, 3, 8, 8)


class Of(nn.Module):
    """A function of an image, with some tensors."""

    def __init__(self, function: Any, **tensors: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.buffers())


def matches(operator: Operator, model: nn.Module, dims: int | None = None) -> list[Call]:
    view = GraphView(symbolic_trace(model))
    return [call for node in view.nodes if (call := operator.match(view, node, dims)) is not None]


def forms(module: nn.Module, function: Any, **tensors: torch.Tensor) -> dict[str, nn.Module]:
    """One call as a module, as a function and as an ATen operator."""
    model = nn.Sequential(module).eval()
    return {"module": model, "function": Of(function, **tensors), "aten": exported((model, (IMAGE,)))[0]}


WEIGHT = torch.randn(6, 3, 3, 3)
CASES: dict[str, tuple[Operator, dict[str, nn.Module], dict[str, Any]]] = {
    "convolution": (
        CONVOLUTION,
        forms(nn.Conv2d(3, 6, 3, stride=2, bias=False), lambda x, w: F.conv2d(x, w, stride=2), weight=WEIGHT),
        {"stride": (2, 2), "padding": (0, 0), "dilation": (1, 1), "groups": 1, "padding_mode": "zeros"},
    ),
    "padding by a rule": (
        CONVOLUTION,
        forms(nn.Conv2d(3, 6, 3, padding="same"), lambda x, w: F.conv2d(x, w, padding="same"), weight=WEIGHT),
        {"padding": "same", "stride": (1, 1)},
    ),
    "pool": (
        AVERAGE_POOL,
        forms(nn.AvgPool2d(2, padding=1), lambda x: F.avg_pool2d(x, 2, padding=1)),
        {"kernel_size": (2, 2), "padding": (1, 1), "divisor_override": None},
    ),
    "pad": (PAD, forms(nn.ZeroPad2d(1), lambda x: F.pad(x, [1, 1, 1, 1])), {"mode": "constant"}),
    "dropout": (DROPOUT, forms(nn.Dropout(0.1), lambda x: F.dropout(x, 0.1, False)), {"p": 0.1, "training": False}),
}


@pytest.mark.parametrize("form", ["module", "function", "aten"])
@pytest.mark.parametrize("case", CASES)
def test_settings_are_complete_in_every_form(case: str, form: str) -> None:
    operator, models, settings = CASES[case]
    (call,) = matches(operator, models[form])
    assert call.kind == form
    assert {name: call.settings[name] for name in settings} == settings


def test_tensors_have_roles_and_the_layer_has_a_name_and_a_width() -> None:
    (call,) = matches(LINEAR, nn.Sequential(nn.Linear(4, 3)))
    assert (call.name, call.width, call.dims, list(call.operands)) == ("0", 3, 0, ["weight", "bias"])
    (norm,) = matches(BATCH_NORM, nn.Sequential(nn.BatchNorm2d(3)).eval())
    assert {"gamma", "beta", "running_mean", "running_var"} <= set(norm.operands) and norm.dims == 2


def test_other_dimensions_are_something_else() -> None:
    model = nn.Sequential(nn.Conv1d(3, 6, 3))
    assert len(matches(CONVOLUTION, model)) == 1 and not matches(CONVOLUTION, model, dims=2)


def test_what_is_no_node_is_something_else() -> None:
    assert LINEAR.match(GraphView(symbolic_trace(nn.Sequential(nn.Linear(4, 3)))), 2.0) is None


def test_a_place_that_almost_fits_is_refused_and_a_refusal_can_be_a_value() -> None:
    view = GraphView(symbolic_trace(Of(lambda x: F.linear(x, x))))
    node: Node = next(node for node in view.nodes if node.target is F.linear)
    refusal = attempt(LINEAR.match, view, node)
    assert isinstance(refusal, Refuse) and refusal.reason == "its weight is computed, not a parameter"
    assert not holds(LINEAR.match, view, node)
