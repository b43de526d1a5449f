"""Engines for any size: what holds at the example's sizes is shown to hold at the smallest and the largest ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule

import refold
from refold.errors import PreparationFailed
from refold.executors import Executor, executor_named
from refold.executors.exported_engine import plan_for_engine
from refold.executors.guards import Guarded
from refold.executors.meaning import _where_it_holds, prepare_as_torch
from refold.executors.open_axes import MOST, OpenAxes
from refold.executors.requirements import index_guard, inputs_of
from refold.executors.sized_cuda_graphs import SizedCudaGraphs
from refold.executors.sized_program import at_sizes

PLACES, WORDS = 64, 50
SIZES = ((3, 16), (1, 16), (5, 40), (2, 7), (1, 2), (2, PLACES), (7, 7))


class Attention(nn.Module):
    """Attention over words at places, of which there is a table."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 16), nn.Embedding(PLACES, 16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        q, k, v = (layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        found = nn.functional.scaled_dot_product_attention(q, k, v, mask[:, None, None, :].bool())
        return found.transpose(1, 2).flatten(2)


def call(rows: int, length: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[-1, length // 2 + 1 :] = 0
    return {"ids": torch.randint(0, WORDS, (rows, length)), "mask": mask}


@pytest.fixture(scope="module")
def captured() -> tuple[nn.Module, GraphModule]:
    torch.manual_seed(0)
    model = Attention().eval()
    return model, refold.trace(model, **call(3, 16))


def agree(model: nn.Module, run: Any, sizes: tuple[int, int]) -> None:
    inputs = call(*sizes)
    with torch.no_grad():
        torch.testing.assert_close(run(**inputs), model(**inputs), rtol=1e-4, atol=1e-5)


def test_sizes_that_capture_left_open(captured: Any) -> None:
    inputs = call(3, 16)
    axes = OpenAxes.of(captured[1], (), inputs)
    tensors = list(inputs.values())
    assert [axis.places for axis in axes.axes] == [((0, 0), (1, 0)), ((0, 1), (1, 1))]
    assert axes.most == [MOST, MOST] and axes.sizes_of(tensors) == [3, 16]
    assert axes.hold(tensors) and not axes.hold([tensors[0], tensors[1][:1]]), "rows differ"
    assert not axes.up_to([2, 16]).hold(tensors)
    assert axes.sizes_of(axes.told_apart([tensor[:, :3] for tensor in tensors])) == [3, 4]
    assert axes.from_size(2).least == [2, 2]
    with pytest.raises(PreparationFailed, match="left no size open"):
        OpenAxes.of(captured[0], (), inputs)


def test_a_program_at_other_sizes(captured: Any) -> None:
    inputs = call(3, 16)
    axes = OpenAxes.of(captured[1], (), inputs)
    plan = plan_for_engine(captured[1], (), inputs, "an engine", axes=axes)
    program = at_sizes(plan.exported, axes.shapes(plan.tensors, [9, 33]))
    last = [node for node in program.graph.nodes if node.op == "call_function"][-1]
    assert last.meta["val"].shape == (9, 33, 16)
    with pytest.raises(PreparationFailed, match="At the sizes"):
        at_sizes(plan.exported, [(3, 16), (3, 5)])


def test_a_table_of_positions_bounds_the_length(captured: Any) -> None:
    inputs = call(3, 16)
    axes = OpenAxes.of(captured[1], (), inputs)
    plan = plan_for_engine(captured[1], (), inputs, "an engine", axes=axes)
    program = at_sizes(plan.exported, axes.shapes(plan.tensors, [3, 16]))
    given = inputs_of(program, plan.tensors)
    found = _where_it_holds(plan, axes, index_guard(program, given), given, {}, {})
    assert found.most == [MOST, PLACES]


@pytest.mark.parametrize("name", ["openvino-open", "onnxruntime-open"])
def test_an_engine_for_any_size(captured: Any, name: str) -> None:
    executor = executor_named(name)
    if executor.available(torch.device("cpu")) is not None:
        pytest.skip(f"{name} is not installed")
    model, gm = captured
    run = executor.prepare(gm, (), call(3, 16))
    assert isinstance(run, Guarded) and run.axes is not None and run.axes.most[1] == PLACES
    for sizes in SIZES:
        agree(model, run, sizes)
    beyond = call(2, PLACES + 1)
    with pytest.raises(IndexError):  # as the model does, since it runs
        run(**beyond)
    outside = call(2, 8)
    outside["ids"][0, 0] = WORDS
    with pytest.raises(IndexError):
        run(**outside)
    with torch.no_grad():
        kept = run(**call(4, 9))
        before = kept.clone()
        run(**call(4, 9))
    assert torch.equal(kept, before), "a result is not written to by the next call"


def test_code_that_is_compiled_once_for_any_size(captured: Any) -> None:
    model, gm = captured
    run = executor_named("compile-open").prepare(gm, (), call(3, 16))
    calls: list[torch.Size] = []
    counter = gm.register_forward_pre_hook(  # the code is compiled without it
        lambda module, args, kwargs: calls.append(kwargs["ids"].shape), with_kwargs=True
    )
    compiled = counters["stats"]["unique_graphs"]
    for sizes in SIZES:
        agree(model, run, sizes)
    assert calls == [sizes for sizes in SIZES if 1 in sizes], "for one row, code would be other code: the graph runs"
    calls.clear()
    agree(model, run.run, (1, 16))
    counter.remove()
    assert calls == [(1, 16)], "and the compiled code does not let it through either"
    assert counters["stats"]["unique_graphs"] == compiled, "no call compiles"


class Foreign(Executor):
    """Another package's way for any size, which has to be probed; it says which sizes it computed."""

    name, takes_any_size = "foreign", True

    def __init__(self) -> None:
        self.seen: list[torch.Size] = []

    def available(self, device: torch.device) -> str | None:
        return None

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.seen += [value.shape for value in kwargs.values()][:1]
            return module(*args, **kwargs)

        return run


def test_another_packages_way_for_any_size_is_probed_once_and_guarded_at_all_sizes(captured: Any) -> None:
    model, gm = captured
    foreign = Foreign()
    run = prepare_as_torch(foreign, gm, (), call(3, 16))
    for sizes in ((3, 16), (5, 9), (1, 2)):
        agree(model, run, sizes)
        assert foreign.seen[-1] == sizes
    with pytest.raises(IndexError):
        run(**call(2, PLACES + 1))
    assert foreign.seen[-1] != (2, PLACES + 1), "the module ran"


class Counting(Executor):
    """Replays nothing: runs what the inner executor prepared, and counts what that took."""

    name, keeps_meaning = "counting", True

    def __init__(self, inner: Executor) -> None:
        self.inner, self.prepared = inner, 0

    def available(self, device: torch.device) -> str | None:
        return None

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        runs = [self.inner.prepare(module, args, kwargs) for _ in range(2)]
        assert runs[0] is runs[1], "every size is recorded over the same code"
        self.prepared += 1
        return runs[0]


def test_graphs_for_sizes_are_recorded_over_code_that_is_compiled_once(captured: Any) -> None:
    model, gm = captured
    made: list[Counting] = []

    def record(inner: Executor) -> Executor:
        made.append(Counting(inner))
        return made[-1]

    executor = SizedCudaGraphs(compiled=executor_named("plain"), record=record)
    run = executor.prepare(gm, (), call(3, 16))
    agree(model, run, (5, 9))
    assert [each.prepared for each in made] == [1] and executor.takes_any_size
    assert "CUDA" in (executor.available(torch.device("cpu")) or "")
