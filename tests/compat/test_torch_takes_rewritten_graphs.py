"""What torch.compile, torch.export and torch.jit.trace could take before a rewrite, they can take after it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import refold
from refold import examples
from refold.examples import attention_layers, layers
from refold.rewrite.rule import Example
from refold.testing.equivalence import as_float64, deviations
from refold.testing.laws import graph_of
from refold.testing.random_models import build

ALL = refold.compose(
    refold.MergeLinears(),
    refold.FuseBiasInLinear(),
    refold.ChangeTrueDivToMulByInverse(),
    refold.FuseBatchNorm2dInConv2d(),
    refold.FuseBatchNorm1dInLinear(),
)
EXAMPLES: dict[str, Callable[[], Example]] = {
    "attention": attention_layers.attention,
    "exported attention": lambda: examples.exported(attention_layers.attention()),
    "functional": layers.functional,
    "conv norm": layers.conv_norm,
    "exported conv norm": lambda: examples.exported(layers.conv_norm()),
    "linear norm, rank unknown": layers.linear_norm,
    "norm linear, rank unknown": layers.norm_linear,
    "mixture": lambda: build(["sliced", "norm then linear", "convolution", "shared", "writes between"], 3),
}


def compiled(gm: GraphModule, inputs: tuple[Any, ...]) -> nn.Module:
    torch.compiler.reset()
    return torch.compile(gm, backend="aot_eager", fullgraph=True)  # type: ignore[return-value]


def exported(gm: GraphModule, inputs: tuple[Any, ...]) -> nn.Module:
    return torch.export.export(gm, inputs, strict=False).module()


def traced(gm: GraphModule, inputs: tuple[Any, ...]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(gm, inputs, check_trace=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("take", [compiled, exported, traced])
@pytest.mark.parametrize("name", EXAMPLES)
def test_taken_before_and_after(name: str, take: Callable[..., nn.Module]) -> None:
    model, inputs = EXAMPLES[name]()
    original, inputs = as_float64(graph_of(model)), as_float64(inputs)
    rewritten = ALL(copy.deepcopy(original))
    assert refold.history(rewritten)
    assert list(deviations(original, take(copy.deepcopy(original), inputs), inputs)) == []
    assert list(deviations(original, take(rewritten, inputs), inputs)) == []
    assert len(refold.history(rewritten)) > 0
    undone = refold.undo(rewritten, None)
    assert undone.code == original.code


def test_the_history_leaves_state_dict_and_parameters_alone() -> None:
    gm = graph_of(attention_layers.attention()[0])
    ALL(gm)
    assert not any("_refold" in name for name in gm.state_dict())
    assert not any("_refold" in name for name, _ in [*gm.named_parameters(), *gm.named_buffers()])
