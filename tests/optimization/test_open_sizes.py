"""Calls of other sizes than the example's run fast, in any spelling; what capture fixed runs the original."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from refold.errors import BadExample, FellBack
from refold.executors import Plain, catalogue
from refold.optimization import steps
from refold.optimization.job_stages import optimize
from refold.record.stack import history
from refold.rewrite.transformation import ReversibleTransformation


class Block(nn.Module):
    """Attention over a batch of tokens, with a mask and settings that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 4.0) -> torch.Tensor:
        x = self.embed(ids)
        scores = self.query(x) @ self.key(x).transpose(1, 2) / scale
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, :] == 0, -1e9)
        return self.norm(scores.softmax(-1) @ self.value(x))


def call(batch: int, length: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1:, length // 2 :] = 0
    return {"ids": torch.randint(0, 50, (batch, length)), "mask": mask}


def make(**settings: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = Block().eval()
    settings = {"backend": "plain", "progress": False, **settings}
    return optimize(model, settings.pop("inputs", call(4, 12)), **settings), copy.deepcopy(model)


@pytest.fixture(scope="module")
def optimized() -> tuple[Any, nn.Module]:
    return make()


def wide(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def agree(fast: Any, reference: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """Whether the fast way was taken, after checking the result by the model's own error in float64."""
    before = sum(fast.fallbacks.values())
    with torch.no_grad():
        exact = copy.deepcopy(reference).double()(*map(wide, args), **{k: wide(v) for k, v in kwargs.items()})
        mine, its = fast(*args, **kwargs), reference(*args, **kwargs)
    assert mine.shape == its.shape and mine.dtype is its.dtype
    if mine.numel():
        assert (mine - exact).abs().max() <= 4 * (its - exact).abs().max() + 2**-22
    return sum(fast.fallbacks.values()) == before


@pytest.mark.parametrize("size", [(4, 12), (1, 12), (3, 7), (7, 40), (2, 1), (1, 1), (9, 2)])
def test_every_size_that_the_graph_takes_runs_the_rewritten_graph(optimized: Any, size: tuple[int, int]) -> None:
    fast, reference = optimized
    assert history(fast.graph_module), "a rewrite fired"
    inputs = call(*size)
    refused = fast.prepared.refusal((), inputs)
    assert agree(fast, reference, **inputs) == (refused is None)
    assert refused is None or min(size) < 2, "only sizes 0 and 1 may be refused"


def test_all_spellings_of_a_call_are_one_call(optimized: Any) -> None:
    fast, reference = optimized
    ids, mask = call(5, 9).values()
    assert agree(fast, reference, ids, mask)
    assert agree(fast, reference, ids, mask=mask)
    assert agree(fast, reference, mask=mask, ids=ids)
    assert agree(fast, reference, ids, mask, 4.0)
    assert agree(fast, reference, ids, mask, scale=4.0)
    assert not agree(fast, reference, ids, mask, scale=2.0)
    assert not agree(fast, reference, ids)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        fast(ids, masks=mask)


def test_an_example_that_leaves_an_argument_out() -> None:
    fast, reference = make(inputs=(torch.randint(0, 50, (3, 6)),))
    other = torch.randint(0, 50, (2, 9))
    assert agree(fast, reference, other) and agree(fast, reference, ids=other, mask=None)
    assert not agree(fast, reference, **call(2, 9))


def test_small_sizes_that_are_refused_warn_of_nothing_and_others_warn_once() -> None:
    fast, reference = make(inputs=call(4, 12))
    fast.prepared.refusal = lambda args, kwargs: "sizes below 2 are refused"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not agree(fast, reference, **call(4, 1)) and fast.fallbacks["sizes below 2 are refused"] == 1
    with pytest.warns(FellBack, match="sizes below 2"):
        fast(**call(4, 12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(**call(4, 12))


class FixedLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (2.0 if x.shape[0] == 4 else 3.0)


def test_what_capture_fixed_runs_the_original_and_names_the_line() -> None:
    model = FixedLength().eval()
    fast = optimize(model, (torch.randn(4, 6),), backend="plain", progress=False)
    assert not agree(fast, copy.deepcopy(model), torch.randn(5, 6))
    (reason,) = fast.fallbacks
    assert "x has size 5 in dimension 0" in reason
    assert agree(fast, copy.deepcopy(model), torch.randn(4, 6))


def test_sizes_of_the_example_alone() -> None:
    fast, reference = make(sizes="example")
    assert agree(fast, reference, **call(4, 12)) and not agree(fast, reference, **call(3, 12))


def test_a_list_of_calls_is_the_mix() -> None:
    fast, reference = make(inputs=[call(4, 12), call(2, 20), call(8, 3)])
    assert agree(fast, reference, **call(5, 30))
    with pytest.raises(BadExample, match="empty list"):
        make(inputs=[])


class RightAtFour(ReversibleTransformation):
    """Right at the example's size only: the kind of mistake that one size never shows."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        node = next(n for n in reversed(graph_module.graph.nodes) if n.op == "call_module")
        with graph_module.graph.inserting_after(node):
            wrong = graph_module.graph.call_function(scaled, (node,))
            node.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)
        return graph_module


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * (1.0 if x.shape[0] in (1, 2, 4) else 1.01)


torch.fx.wrap("scaled")


def test_a_rewrite_that_is_wrong_at_another_size_is_never_run_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_measured", lambda *_: None)  # else it is taken back as slower
    fast, reference = make(pipeline=[RightAtFour()])
    assert not agree(fast, reference, **call(3, 12))
    assert agree(fast, reference, **call(4, 12))
    assert fast.report.steps[0].status == "kept"
    assert any("is not the model at the sizes" in note for note in fast.report.notes)


class OneSize(Plain):
    """Takes the sizes of its example alone, as a CUDA graph does."""

    name, takes_any_size, runs = "one-size", False, 0

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        built_for = [value.shape for value in (*args, *kwargs.values())]

        def run(*args: Any, **kwargs: Any) -> Any:
            assert built_for == [value.shape for value in (*args, *kwargs.values())], "it is for one size"
            type(self).runs += 1
            return module(*args, **kwargs)

        return run


def test_an_executor_for_one_size_serves_the_examples_and_another_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "BUILT_IN", (*catalogue.BUILT_IN, OneSize()))
    fast, reference = make(backend="one-size")
    runs = OneSize.runs
    assert agree(fast, reference, **call(4, 12)) and OneSize.runs == runs + 1
    assert agree(fast, reference, **call(5, 12)) and OneSize.runs == runs + 1
    assert fast.prepared.at_any_size.executor == "plain"


def test_inputs_of_other_sizes_may_lie_otherwise_in_memory(optimized: Any) -> None:
    fast, reference = optimized
    inputs = {name: value.t().contiguous().t() for name, value in call(6, 10).items()}
    assert not inputs["ids"].is_contiguous() and agree(fast, reference, **inputs)


def test_images_of_other_batch_sizes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
    x = torch.randn(2, 3, 8, 8)
    fast, reference = optimize(model, (x,), backend="plain", progress=False), copy.deepcopy(model)
    assert agree(fast, reference, torch.randn(5, 3, 8, 8)) and agree(fast, reference, torch.randn(1, 3, 8, 8))
    assert agree(fast, reference, torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last))
