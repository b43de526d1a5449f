"""An engine that is right for masks of ones only is used for those only."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import refold
from refold.executors import Executor, Plain
from refold.optimizing import choosing
from refold.optimizing.padding import ForMasksOfOnes, PaddedExample


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
    follows_weights = False

    def __init__(self, nan: bool = False) -> None:
        self.nan = nan

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def run(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            if self.nan:
                return module(ids, mask) / mask.prod(1, keepdim=True) * mask.prod(1, keepdim=True)
            return module(ids, torch.ones_like(mask))

        return run


class BlindThatFollows(Blind):
    follows_weights = True


def example() -> dict[str, torch.Tensor]:
    ids = torch.randint(20, (2, 6), generator=torch.Generator().manual_seed(0))
    return {"ids": ids, "mask": torch.ones_like(ids)}


def optimized(monkeypatch: pytest.MonkeyPatch, model: nn.Module, executor: Executor, inputs: dict[str, Any]) -> Any:
    monkeypatch.setattr(choosing, "executor_named", lambda name: executor)
    return refold.optimize(model, inputs, backend="blind", pipeline=[], progress=False, time_budget=2)


@pytest.mark.parametrize("nan", [False, True])
@torch.no_grad()
def test_calls_with_padding_are_left_to_the_graph(monkeypatch: pytest.MonkeyPatch, nan: bool):
    model = Pool().eval()
    reference = copy.deepcopy(model)
    fast = optimized(monkeypatch, model, Blind(nan), example())
    run = fast.variants[0].run
    assert isinstance(run, ForMasksOfOnes) and "Calls with padding run as a plain graph" in str(run)
    ids, ones = example().values()
    left, right = ones.clone(), ones.clone()
    left[1, :2] = 0
    right[0, 4:] = 0
    for mask in (ones, left, right):
        torch.testing.assert_close(fast(ids=ids, mask=mask), reference(ids, mask))
        torch.testing.assert_close(run(ids=ids, mask=mask), reference(ids, mask))
    assert nan or torch.equal(run.run(ids, left), run.run(ids, ones)), "the engine itself is blind"


def test_one_that_follows_weights_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(refold.RefoldError, match="wrong where the mask is not all ones"):
        optimized(monkeypatch, Pool().eval(), BlindThatFollows(), example())


def test_what_is_right_with_padding_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch):
    class Right(Blind):
        def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return lambda ids, mask: module(ids, mask) + 0

    fast = optimized(monkeypatch, Pool().eval(), Right(), example())
    assert not isinstance(fast.variants[0].run, ForMasksOfOnes)


def test_where_the_padding_is():
    seen = []

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            seen.append(mask.int().tolist())
            return x

    x = torch.ones(2, 3)
    for mask, places in ((torch.ones(2, 3), []), (torch.zeros(2, 3).bool(), []), (torch.ones(3).long(), [])):
        assert PaddedExample(Looks(), (x, mask)).places == places
    assert not seen, "without a mask of ones, nothing is run"
    assert PaddedExample(Looks(), (x, torch.ones(3, 3, dtype=torch.bool))).places == [1]
    assert PaddedExample(Looks(), (x, torch.ones(1, 3, dtype=torch.int64))).places == [1]
    assert seen == [[[0, 1, 1], [1, 1, 1], [1, 1, 0]], [[0, 1, 1]]]


def test_a_module_that_takes_no_padding_is_not_asked():
    class Insists(nn.Module):
        def forward(self, mask: torch.Tensor) -> torch.Tensor:
            if not bool(mask.all()):
                raise ValueError("no padding")
            return mask + 1

    assert PaddedExample(Insists(), (torch.ones(2, 3).long(),)).objection(lambda mask: mask) is None


@torch.no_grad()
def test_left_padding_for_a_decoder_stays_finite():
    pytest.importorskip("openvino")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(vocab_size=50, num_hidden_layers=1, **sizes)
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(50, (2, 7))
    reference, mask = copy.deepcopy(model), torch.ones_like(ids)
    call = {"input_ids": ids, "use_cache": False}
    fast = refold.optimize(
        model, call | {"attention_mask": mask}, backend="openvino", pipeline=[], progress=False, time_budget=5
    )
    padded = mask.clone()
    padded[0, :2] = 0
    for given in (mask, padded):
        inputs = call | {"attention_mask": given}
        torch.testing.assert_close(fast(**inputs).logits, reference(**inputs).logits, atol=1e-4, rtol=1e-4)
