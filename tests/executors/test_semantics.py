"""An executor gives what torch gives, in values, in places of NaN and in errors, or it says why it cannot."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.value_probes import PROBES, Function, Probe
from torch import nn

import refold
from refold.executors import Checked, Executor, PreparationFailed, executor_named
from refold.executors.guards import Guarded
from refold.executors.meaning import prepare_as_torch


def outcome(run: Callable[..., Any], values: tuple[torch.Tensor, ...]) -> Any:
    with torch.no_grad():
        try:
            return run(*(value.clone() for value in values))
        except (ArithmeticError, LookupError, RuntimeError) as error:
            return error


def why_different(mine: Any, its: Any) -> str | None:
    """How an engine's answer differs from torch's."""
    if isinstance(mine, Exception) or isinstance(its, Exception):
        return None if isinstance(mine, Exception) and isinstance(its, Exception) else f"{mine!r} and {its!r}"
    if mine.shape != its.shape or mine.dtype != its.dtype:
        return "shape or type"
    if not mine.is_floating_point():
        return None if torch.equal(mine, its) else f"{mine} and {its}"
    special = [torch.equal(test(mine), test(its)) for test in (torch.isnan, torch.isposinf, torch.isneginf)]
    finite = mine.isfinite()
    error = (mine[finite].double() - its[finite].double()).abs() if all(special) else torch.tensor([torch.inf])
    bound = 64 * torch.finfo(mine.dtype).eps * (mine[finite].double().abs() + 1)
    return None if bool((error <= bound).all()) else f"{mine} and {its}"


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_engines_give_what_torch_gives(engine: str) -> None:
    """Each probe that the engine takes, and it must take most. (All of them: benchmarks/semantics.py.)"""
    pytest.importorskip(engine)
    assert len(PROBES) >= 64
    some = PROBES[1::14]
    taken, wrong = 0, []
    for probe in some:
        model = Function(probe.function).eval()
        try:
            run = executor_named(engine).prepare(model, probe.example, {})
        except PreparationFailed:
            continue
        taken += 1
        different = why_different(outcome(model, probe.values), outcome(run, probe.values))
        if different is not None:
            wrong.append(f"{probe.name}: {different}")
    assert not wrong and taken >= len(some) // 2


def probe_of(name: str) -> Probe:
    return next(probe for probe in PROBES if probe.name == name)


@pytest.mark.parametrize("name", ["embedding, too large", "embedding, negative", "relu of NaN and infinities"])
def test_an_optimized_model_gives_what_torch_gives(name: str) -> None:
    pytest.importorskip("openvino")
    probe = probe_of(name)
    model = Function(probe.function).eval()
    fast = refold.optimize(model, probe.example, backend="openvino", time_budget=5, progress=False)
    for values in (probe.example, probe.values):
        assert why_different(outcome(model, values), outcome(fast, values)) is None


@pytest.mark.parametrize("name", ["computed, too large", "index from floats, NaN"])
def test_a_computed_index_is_left_to_torch(name: str) -> None:
    pytest.importorskip("onnxruntime")
    probe = probe_of(name)
    with pytest.raises(PreparationFailed, match="reads at indices that are computed"):
        executor_named("onnxruntime").prepare(Function(probe.function).eval(), probe.example, {})


def test_an_index_that_is_bounded_by_what_computes_it_is_taken() -> None:
    pytest.importorskip("onnxruntime")
    x = torch.randn(2, 8)
    model = Function(lambda table, x: table[x.argmax(-1)]).eval()
    run = executor_named("onnxruntime").prepare(model, (x,), {})
    with torch.no_grad():
        assert torch.equal(run(x), model(x))
    assert not isinstance(run, Guarded) or all(condition.place == 0 for condition in run.guard)


def test_compiled_code_takes_no_negative_index_of_an_embedding() -> None:
    probe = probe_of("index_select, negative")
    model = Function(probe.function).eval()
    run = executor_named("compile").prepare(model, probe.example, {})
    for values in (probe.example, probe.values):
        assert why_different(outcome(model, values), outcome(run, values)) is None


class Shifted(Executor):
    """A plug-in that gives other numbers where they are negative, and keeps quiet about NaN."""

    name = "shifted"

    def available(self, device: torch.device) -> str | None:
        return None

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        module = copy.deepcopy(module)

        def run(*args: Any, **kwargs: Any) -> Any:
            args = tuple(arg.nan_to_num() if arg.is_floating_point() else arg.clamp_min(0) for arg in args)
            return module(*args, **kwargs)

        return run


def test_a_plug_in_that_lies_about_nan_is_guarded_or_refused() -> None:
    x = torch.randn(4, 8)
    relu, root = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), Function(lambda table, x: torch.relu(torch.log(x)))
    run = prepare_as_torch(Shifted(), relu, (x,), {})
    assert isinstance(run, Guarded) and isinstance(run, Checked)
    x[1, 2] = torch.nan
    assert why_different(outcome(relu, (x,)), outcome(run, (x,))) is None
    with pytest.raises(PreparationFailed, match=r"log otherwise than torch \(NaN or infinity elsewhere"):
        prepare_as_torch(Shifted(), root.eval(), (x.nan_to_num().abs() + 1,), {})


class Wrong(Shifted):
    name = "wrong"

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        plain = super().prepare(module, args, kwargs)
        return lambda *args, **kwargs: torch.utils._pytree.tree_map(lambda t: t * (1 + 1e-3), plain(*args, **kwargs))


def test_a_plug_in_with_other_numbers_is_refused_with_the_operator() -> None:
    with pytest.raises(PreparationFailed, match=r"linear otherwise than torch: other numbers"):
        prepare_as_torch(Wrong(), nn.Linear(4, 4).eval(), (torch.randn(2, 4),), {})


class Honest(Executor):
    name = "honest"
    keeps_meaning = True

    def available(self, device: torch.device) -> str | None:
        return None

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        return module


def test_a_plug_in_that_runs_torch_is_not_probed() -> None:
    model = nn.ReLU()
    assert prepare_as_torch(Honest(), model, (torch.randn(2),), {}) is model
