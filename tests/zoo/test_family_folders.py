"""A dozen families: what is loaded from a folder is called as the model is, and gives what the saved graph gave."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.fx import GraphModule  # noqa: E402
from zoo_families import FAMILIES, captured_of, make  # noqa: E402

import refold  # noqa: E402
from refold.nested import OUTPUT, flatten  # noqa: E402


def assert_same_calls(loaded: GraphModule, saved: GraphModule, model: nn.Module, args: Any, kwargs: Any) -> None:
    """As they were called, by keyword, and the first argument by position; defaults left out and given."""
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    signature, first = inspect.signature(saved.forward), next(iter(bound.arguments))
    assert str(inspect.signature(loaded.forward)) == str(signature)
    others = {name: value for name, value in bound.arguments.items() if name != first}
    left_out = {n: p.default for n, p in signature.parameters.items() if n not in bound.arguments and n != "use_cache"}
    ways = [(args, kwargs), ((), dict(bound.arguments)), ((bound.arguments[first],), {**others, **left_out})]
    for given, named in ways:
        expected, found = saved(*given, **named), loaded(*given, **named)
        assert type(found) is type(expected)
        pairs = zip(flatten(found, OUTPUT)[1], flatten(expected, OUTPUT)[1], strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_loaded_family_is_called_as_the_model_is(name: str, tmp_path: Path) -> None:
    model, args, kwargs, captured = captured_of(name)
    other = copy.deepcopy(model)
    with torch.no_grad():
        saved = refold.compose(refold.MergeLinears(), refold.FuseBiasInLinear())(copy.deepcopy(captured))
        refold.save(saved, tmp_path / "saved")
        assert_same_calls(refold.load(tmp_path / "saved", other), saved, model, args, kwargs)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_a_loaded_fast_way_is_called_as_the_model_is(name: str, tmp_path: Path) -> None:
    model, args, kwargs = make(name)
    other = copy.deepcopy(model)
    with torch.no_grad():
        fast = refold.optimize(model, kwargs or args, backend="plain", progress=False)
        saved = fast.graph_module
        assert saved is not None
        refold.save(saved, tmp_path / "saved")
        loaded = refold.load(tmp_path / "saved", other)
        found, expected = loaded(*args, **kwargs), fast(*args, **kwargs)
    pairs = zip(flatten(found, OUTPUT)[1], flatten(expected, OUTPUT)[1], strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
