"""What was built from a model never computes with weights that the model no longer has."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import refold
from refold.executors import Executor, Signature, builtin
from refold.optimizing import choosing
from refold.optimizing.freshness import Freshness, read_in_eval
from refold.optimizing.optimized import OptimizedModule
from refold.optimizing.variant import Variant
from refold.report.data import ModelSummary, Report


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.query(x) + 2 * self.key(x) + 3 * self.value(x)


class Columns(nn.Module):
    """Weights of (in, out), as GPT-2 has them: merged by columns, which are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))
        self.bias_1, self.bias_2 = (nn.Parameter(torch.randn(8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias_1, x, self.first) * torch.addmm(self.bias_2, x, self.second)


def merged(model: nn.Module, x: torch.Tensor) -> OptimizedModule:
    """As refold.optimize makes it, but for sure with the merge."""

    def built(x: torch.Tensor) -> Variant:
        gm = refold.trace(model, x, dynamic=False)
        refold.MergeLinears()(gm)
        assert len(refold.history(gm)) == 1, "the merge must have fired"
        freshness = Freshness(read_in_eval(model), gm, follows=True)
        return Variant(Signature.of((x,), {}), gm, gm, "plain", freshness, Report("merged", ModelSummary("model")))

    return OptimizedModule(model, built(x), lambda args, kwargs: built(*args))


def fell_back(optimized: OptimizedModule) -> bool:
    return any("weights of the original were changed" in note for note in optimized.notes)


def change(*tensors: torch.Tensor) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(3)


def output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x).clone()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def test_merged_weights_are_followed(x: torch.Tensor):
    model = Linears().eval()
    optimized = merged(model, x)
    before = output(optimized, x)
    change(model.query.weight, model.value.bias)
    torch.testing.assert_close(output(optimized, x), output(model, x))
    assert not torch.equal(before, output(optimized, x)) and not fell_back(optimized)


def test_weights_that_were_joined_by_columns_are_copies(x: torch.Tensor):
    model = Columns().eval()
    optimized = merged(model, x)
    change(model.first)
    torch.testing.assert_close(output(optimized, x), output(model, x))
    assert fell_back(optimized)


class Positions(Linears):
    """A buffer that no checkpoint holds becomes part of a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(8.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + (self.positions * 2).cos())


def test_weights_beside_a_constant_are_followed_and_its_buffers_are_watched(x: torch.Tensor):
    model = Positions().eval()
    gm = refold.trace(model, x, dynamic=False)
    refold.compose(refold.FoldConstants(), refold.MergeLinears())(gm)
    assert [change.name for change in refold.history(gm)] == ["FoldConstants", "MergeLinears"]
    freshness = Freshness(read_in_eval(model), gm, follows=True)
    change(model.query.weight)
    assert freshness.is_fresh()
    torch.testing.assert_close(output(gm, x), output(model, x))
    change(model.positions)
    assert not freshness.is_fresh()


def test_a_piece_of_memory_that_only_others_read_is_not_followed(x: torch.Tensor):
    memory = torch.randn(3 * 64)
    model = Columns().eval()
    model.first.data, model.second.data = memory[:64].view(8, 8), memory[64:128].view(8, 8)
    model.third = nn.Parameter(memory[128:].view(8, 8))
    gm = refold.trace(model, x, dynamic=False)
    refold.MergeLinears()(gm)
    gm.third = model.third  # the same storage, another piece of it
    freshness = Freshness(read_in_eval(model), gm, follows=True)
    change(model.third)
    assert freshness.is_fresh()
    change(model.first)
    assert not freshness.is_fresh()


def test_a_second_merge_parts_the_first_from_the_weights(x: torch.Tensor):
    model = Linears().eval()
    optimized = merged(model, x)
    torch.testing.assert_close(output(optimized, x[:2]), output(model, x[:2]))
    assert len(optimized.variants) == 2
    torch.testing.assert_close(output(optimized, x), output(model, x))
    assert not fell_back(optimized), "the parted copy still holds the same weights"
    change(model.query.weight)
    torch.testing.assert_close(output(optimized, x), output(model, x))
    torch.testing.assert_close(output(optimized, x[:2]), output(model, x[:2]))
    assert fell_back(optimized)


def test_weights_that_changed_before_the_parting_was_seen(x: torch.Tensor):
    model = Linears().eval()
    first = merged(model, x)
    second = merged(model, x)
    change(model.query.weight)
    torch.testing.assert_close(output(first, x), output(model, x))
    assert fell_back(first)
    torch.testing.assert_close(output(second, x), output(model, x))
    assert not fell_back(second)
    second.restore()
    change(model.key.weight)
    torch.testing.assert_close(output(first, x), output(model, x))


def test_what_is_built_after_a_change_is_used(x: torch.Tensor):
    model = Columns().eval()
    optimized = merged(model, x)
    change(model.first)
    torch.testing.assert_close(output(optimized, x[:2]), output(model, x[:2]))
    assert len(optimized.variants) == 2 and not fell_back(optimized)
    torch.testing.assert_close(output(optimized, x[:2]), output(model, x[:2]))
    assert not fell_back(optimized)


class FixedAddresses(Executor):
    """Reads the weights from where they lay when it was prepared, as a CUDA graph does."""

    name = "fixed-addresses"

    def available(self, device: torch.device) -> str | None:
        return None

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        addresses = [weight.data_ptr() for weight in module.parameters()]

        def run(*args: Any, **kwargs: Any) -> Any:
            assert addresses == [weight.data_ptr() for weight in module.parameters()], "it would read freed memory"
            return module(*args, **kwargs)

        return run


def test_what_reads_fixed_addresses_is_prepared_again_when_merged_weights_move(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(builtin, "BUILT_IN", (*builtin.BUILT_IN, FixedAddresses()))
    monkeypatch.setattr(choosing.Choice, "rewrites_hinder", True)
    model = Linears().eval()
    optimized = refold.optimize(
        model, (x,), backend="fixed-addresses", pipeline=[refold.MergeLinears()], progress=False
    )
    assert not refold.history(optimized.graph_module), "the merge was taken back"
    torch.testing.assert_close(output(optimized, x), output(model, x))
    assert not optimized.notes


def test_memory_that_is_read_is_held_when_the_weights_move(x: torch.Tensor):
    model = Linears().eval()
    freshness = Freshness(read_in_eval(model), None, follows=True)
    address = model.query.weight.data_ptr()
    optimized = merged(model, x)
    assert model.query.weight.data_ptr() != address
    assert freshness.is_fresh()
    assert address in [held.data_ptr() for _, held in freshness._held]
    change(model.query.weight)
    assert not freshness.is_fresh()
    assert optimized.graph_module is not None


def test_how_many_batches_a_norm_saw_is_no_weight():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    freshness = Freshness(read_in_eval(model), None, follows=False)
    model[1].num_batches_tracked.add_(1)
    assert freshness.is_fresh()
    model[1].running_mean.add_(1)
    assert not freshness.is_fresh()


def write_through_data(weight: torch.Tensor) -> None:
    weight.data.mul_(2)


def give_other_memory(weight: torch.Tensor) -> None:
    weight.data = weight.data * 2


UNCOUNTED = [write_through_data, give_other_memory]


@pytest.mark.parametrize("write", UNCOUNTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex128])
def test_what_torch_does_not_count_is_seen_in_copies(write: Callable[[torch.Tensor], None], dtype: torch.dtype):
    weights = [torch.ones(3, 5).to(dtype).t(), torch.ones(2, dtype=dtype)]
    counts = [weight._version for weight in weights]
    freshness = Freshness(weights, None, follows=False)
    assert freshness.is_fresh()
    before = weights[1].data
    write(weights[1])
    assert [weight._version for weight in weights] == counts
    assert not freshness.is_fresh() and not freshness.is_fresh()
    weights[1].data = before
    assert freshness.is_fresh() is (write is not write_through_data), "the old memory with the old contents"


@pytest.mark.parametrize("written", range(6))
def test_what_torch_does_not_count_is_seen_among_weights_of_all_widths(written: int):
    dtypes = [torch.int8, torch.float32, torch.float16, torch.complex128, torch.float64, torch.int8]
    weights = [torch.ones(4, 7, dtype=dtype) for dtype in dtypes]
    empty, odd = torch.empty(0), torch.frombuffer(bytearray(17), dtype=torch.float32, count=4, offset=1)
    freshness = Freshness([*weights, empty, odd], None, follows=False)
    assert freshness.is_fresh()
    weights[written].data[2, 3] = 2
    assert not freshness.is_fresh()
    weights[written].data[2, 3] = 1
    assert freshness.is_fresh()


@pytest.mark.parametrize("write", UNCOUNTED)
def test_an_engine_does_not_run_with_weights_that_were_written_through_data(write: Callable[[torch.Tensor], None]):
    pytest.importorskip("onnxruntime")
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval(), torch.randn(2, 8)
    optimized = refold.optimize(model, (x,), backend="onnxruntime", progress=False)
    torch.testing.assert_close(output(optimized, x), output(model, x))
    assert not fell_back(optimized)
    write(model[2].weight)
    assert torch.equal(output(optimized, x), output(model, x)) and fell_back(optimized)


def test_merged_weights_that_get_other_memory_are_not_followed(x: torch.Tensor):
    model = Linears().eval()
    optimized = merged(model, x)
    write_through_data(model.query.weight)
    torch.testing.assert_close(output(optimized, x), output(model, x))
    assert not fell_back(optimized), "they share their memory"
    give_other_memory(model.query.weight)
    torch.testing.assert_close(output(optimized, x), output(model, x))
    assert fell_back(optimized)


def test_weights_of_inference_mode_are_seen_to_change():
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        freshness = Freshness(read_in_eval(model), None, follows=False)
        assert freshness.is_fresh()
        model[0].weight.mul_(2)
        assert not freshness.is_fresh()


def test_memory_that_is_only_compared_is_not_held_for_ever():
    weight = nn.Parameter(torch.ones(4))
    freshness = Freshness([weight], None, follows=False)
    memory = weakref.ref(weight.untyped_storage())
    give_other_memory(weight)
    assert not freshness.is_fresh()
    gc.collect()
    assert memory() is None


def test_copied_weights_may_move_with_another_graph(x: torch.Tensor):
    """Merging moves them, contents and all: an engine's copy stays right, and is noticed to be old afterwards."""
    model = Linears().eval()
    freshness = Freshness(read_in_eval(model), None, follows=False)
    address = model.query.weight.data_ptr()
    optimized = merged(model, x)
    assert model.query.weight.data_ptr() != address and optimized.graph_module is not None
    assert freshness.is_fresh()
    write_through_data(model.query.weight)
    assert not freshness.is_fresh()
