"""What a prepared callable was built for: every other call is told in a sentence, whatever it holds."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

import refold
from refold.executors import InputSpec, PreparationFailed, UnsupportedInput, executor_named

X = torch.randn(2, 3)


def refusal(built_for: tuple[Any, ...], given: tuple[Any, ...]) -> str:
    with pytest.raises(UnsupportedInput) as refused:
        InputSpec.of(built_for, {}).tensors(given, {})
    return str(refused.value)


@pytest.mark.parametrize(
    ("built_for", "given", "told"),
    [
        (None, (X, X), "was given a tuple"),
        (X, (X, X, X), "was given a tuple"),
        (X, (X.shape, X.dtype, X.device, X.layout), "was given a tuple"),
        (X, [X], "was given a list"),
        (None, object(), "was given a object"),
        (X, X.to_sparse(), "was given a sparse_coo torch.float32 tensor of shape (2, 3)"),
        (X, torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "was given a nested tensor"),
        (X, torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "was given a nested"),
        (0.0, -0.0, "built for 0.0 and was given -0.0"),
        (complex(1, 0.0), complex(1, -0.0), "was given (1-0j)"),
        (1, True, "built for 1 and was given True"),
        (math.nan, 0.0, "built for nan and was given 0.0"),
    ],
)
def test_another_leaf(built_for: Any, given: Any, told: str):
    assert told in refusal((X, built_for), (X, given))


def test_the_same_constants():
    for constant in (0.0, -0.0, 1 + 0j, None, "a", True, torch.float16):
        assert len(InputSpec.of((X, constant), {}).tensors((X, copy.deepcopy(constant)), {})) == 1


def test_nested_tensors_are_refused_when_it_is_built():
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    with pytest.raises(PreparationFailed, match="nested tensor"):
        InputSpec.of((nested,), {})


def test_autocast_to_another_type_is_another_call():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        spec = InputSpec.of((X,), {})
        assert spec.tensors((X,), {})
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(UnsupportedInput, match="Autocast"):
        spec.tensors((X,), {})
    with pytest.raises(UnsupportedInput, match="Autocast"):
        spec.tensors((X,), {})


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).relu() + self.b(x)


@pytest.fixture(scope="module")
def frozen() -> Any:
    return executor_named("compile-freezing").prepare(Sum().eval(), (X,), {})


@torch.no_grad()
def test_transforms_are_refused(frozen: Any):
    with pytest.raises(UnsupportedInput, match=r"torch\.func"):
        torch.func.vmap(frozen)(torch.randn(4, 2, 3))
    with pytest.raises(UnsupportedInput, match=r"torch\.func"):
        torch.func.jvp(frozen, (X,), (X,))
    with forward_ad.dual_level(), pytest.raises(UnsupportedInput, match="forward-mode"):
        frozen(forward_ad.make_dual(X, torch.ones_like(X)))
    assert frozen(X).shape == (2, 3)


@torch.no_grad()
def test_an_optimized_model_is_transformed_as_the_original_is():
    model = Sum().eval()
    reference, many = copy.deepcopy(model), torch.randn(4, 2, 3)
    fast = refold.optimize(model, (X,), backend="compile-freezing", progress=False, time_budget=2)
    torch.testing.assert_close(torch.func.vmap(fast)(many), reference(many))
    tangents = [torch.func.jvp(f, (X,), (torch.ones_like(X),))[1] for f in (fast, reference)]
    torch.testing.assert_close(*tangents)
    assert any("torch.func" in note for note in fast.notes)


@torch.no_grad()
def test_an_argument_of_another_kind_goes_to_the_original():
    model, x = nn.LSTM(4, 6).eval(), torch.randn(5, 2, 4)
    state = torch.ones(1, 2, 6), torch.ones(1, 2, 6)
    fast = refold.optimize(model, (x, None), backend="plain", progress=False, time_budget=2)
    assert torch.equal(fast(x, state)[0], copy.deepcopy(model)(x, state)[0])
    assert fast.notes == ["ran the original: It was built for None and was given a tuple."]


@torch.no_grad()
def test_to_be_compiled_is_no_transform():
    fast = refold.optimize(Sum().eval(), (X,), backend="plain", progress=False, time_budget=2)
    torch.testing.assert_close(torch.compile(fast, backend="eager")(X), fast(X))
    assert not fast.notes


@pytest.mark.parametrize("backend", ["plain", "compile-freezing", "onnxruntime", "openvino"])
@torch.no_grad()
def test_who_traces_an_optimized_model_traces_the_original(backend: str):
    """An engine's outputs would be constants in the trace."""
    if backend in ("onnxruntime", "openvino"):
        pytest.importorskip(backend)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval().requires_grad_(False)
    fast = refold.optimize(model, (X,), backend=backend, progress=False, time_budget=2)
    other = torch.randn(2, 3)
    expected = copy.deepcopy(model)(other)
    torch.testing.assert_close(torch.jit.trace(lambda x: fast(x), X)(other), expected)
    torch.testing.assert_close(make_fx(fast)(X)(other), expected)
    with FlopCounterMode(display=False) as counter:
        fast(X)
    assert counter.get_total_flops() > 0
    torch.testing.assert_close(fast(other), expected)


@torch.no_grad()
def test_hooks_of_an_optimized_model_are_called():
    fast = refold.optimize(nn.Linear(3, 3).eval(), (X,), backend="plain", progress=False, time_budget=2)
    expected, called = fast(X), []
    before = fast.register_forward_pre_hook(lambda module, args: called.append("before"))
    after = fast.register_forward_hook(lambda module, args, output: called.append("after") or output + 1)
    assert torch.equal(fast(X), expected + 1) and called == ["before", "after"]
    before.remove()
    after.remove()
    everywhere = register_module_forward_hook(lambda module, args, output: called.append(type(module).__name__))
    fast(X)
    assert called[2:] and called[-1] == "OptimizedModule"
    everywhere.remove()
    called.clear()
    assert torch.equal(fast(X), expected) and torch.equal(fast(X), expected) and not called
    again = fast.register_forward_hook(lambda module, args, output: output + 2)
    assert torch.equal(fast(X), expected + 2)
    again.remove()
