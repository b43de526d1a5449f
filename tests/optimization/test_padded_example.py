"""Executors are also compared on a padded batch, and one that differs there is not chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import refold
from refold.call_arguments import CallArguments
from refold.executors import Executor, Plain
from refold.optimization import choice
from refold.optimization.padded_example import PaddedExample


class Pool(nn.Module):
    """The mean of what a mask leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (self.words(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class Blind(Plain):
    """Takes every mask for ones, as an engine might; NaN where a row is padded, if asked for."""

    name = "blind"
    reads_live_weights = False

    def __init__(self, nan: bool = False) -> None:
        self.nan = nan

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def run(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            if self.nan:
                return module(ids, mask) / mask.prod(1, keepdim=True) * mask.prod(1, keepdim=True)
            return module(ids, torch.ones_like(mask))

        return run


def example() -> dict[str, torch.Tensor]:
    ids = torch.randint(20, (2, 6), generator=torch.Generator().manual_seed(0))
    return {"ids": ids, "mask": torch.ones_like(ids)}


def optimized(monkeypatch: pytest.MonkeyPatch, model: nn.Module, executor: Executor, inputs: dict[str, Any]) -> Any:
    monkeypatch.setattr(choice, "executor_named", lambda name: executor)
    return refold.optimize(model, inputs, backend="blind", pipeline=[], progress=False, time_budget=2)


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("follows", [False, True])
def test_an_executor_that_differs_on_padded_rows_is_refused(monkeypatch: pytest.MonkeyPatch, nan: bool, follows: bool):
    executor = Blind(nan)
    executor.reads_live_weights = follows
    with pytest.raises(refold.RefoldError, match="wrong where the mask is not all ones"):
        optimized(monkeypatch, Pool().eval(), executor, example())


def test_an_executor_that_is_right_with_padding_is_used(monkeypatch: pytest.MonkeyPatch):
    class Right(Blind):
        def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return lambda ids, mask: module(ids, mask) + 0

    fast = optimized(monkeypatch, Pool().eval(), Right(), example())
    assert fast.prepared.at_example.executor == "blind"


def test_where_the_padding_is():
    seen = []

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            seen.append(mask.int().tolist())
            return x

    x = torch.ones(2, 3)
    for mask, places in ((torch.ones(2, 3), []), (torch.zeros(2, 3).bool(), []), (torch.ones(3).long(), [])):
        assert PaddedExample(Looks(), CallArguments((x, mask))).places == places
    assert not seen, "without a mask of ones, nothing is run"
    assert PaddedExample(Looks(), CallArguments((x, torch.ones(3, 3, dtype=torch.bool)))).places == [1]
    assert PaddedExample(Looks(), CallArguments((x, torch.ones(1, 3, dtype=torch.int64)))).places == [1]
    assert seen == [[[0, 1, 1], [1, 1, 1], [1, 1, 0]], [[0, 1, 1]]]


def test_a_module_that_takes_no_padding_is_not_asked():
    class Insists(nn.Module):
        def forward(self, mask: torch.Tensor) -> torch.Tensor:
            if not bool(mask.all()):
                raise ValueError("no padding")
            return mask + 1

    assert PaddedExample(Insists(), CallArguments((torch.ones(2, 3).long(),))).objection(lambda mask: mask) is None


@torch.no_grad()
def test_left_padding_for_a_decoder_stays_finite():
    """OpenVINO gives NaN for a query that may look at nothing, and the model does not: torch runs such a mask."""
    pytest.importorskip("openvino")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(vocab_size=50, num_hidden_layers=1, **sizes)
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(50, (2, 7))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    fast = refold.optimize(model, inputs, backend="openvino", pipeline=[], progress=False, time_budget=5)
    inputs["attention_mask"][0, :2] = 0
    with torch.no_grad():
        assert torch.equal(fast(**inputs).logits.isnan(), model(**inputs).logits.isnan())
