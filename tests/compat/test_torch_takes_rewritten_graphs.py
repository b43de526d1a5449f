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
from refold.rewrite.registry import registered
from refold.rewrite.rule import Example, Rewrite
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


def is_scripted(gm: GraphModule) -> bool:
    """Whether torch.jit.script takes a graph; it never takes what an export made, nor calls of ATen overloads."""
    try:
        torch.jit.script(gm)
    except Exception:
        return False
    return True


RULES = [cls for cls in registered() if cls.__module__.startswith("refold.")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rule", RULES, ids=lambda cls: cls.__name__)
def test_scripted_before_and_after(rule: type[Rewrite]) -> None:
    scripted = 0
    for model, inputs in rule.examples():
        gm = graph_of(model)
        if not is_scripted(gm):
            continue
        scripted += 1
        expected = copy.deepcopy(gm)(*inputs)
        rule()(gm)
        assert refold.history(gm)
        for taken in (gm, copy.deepcopy(gm)):
            torch.testing.assert_close(torch.jit.script(taken)(*inputs), expected)
    if not scripted:
        pytest.skip("torch scripts none of its examples, rewritten or not")
