"""Calls whose mask is all ones run without it; all other calls run with it, and every call is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import refold
from refold.measure import Measurement, Timing
from refold.optimizing import all_ones, steps
from refold.optimizing.optimized import OptimizedModule
from refold.result import Result


class Masked(nn.Module):
    """An embedding and an attention with a padding mask, as BERT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        heads = [layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        allowed = (mask[:, None, None, :] > 0).expand(-1, 1, mask.shape[1], -1)
        return F.scaled_dot_product_attention(*heads, attn_mask=allowed)


def example() -> dict[str, torch.Tensor]:
    ids = torch.randint(20, (2, 6), generator=torch.Generator().manual_seed(0))
    return {"ids": ids, "mask": torch.ones_like(ids)}


def optimized_as_if(ratio: float, monkeypatch: pytest.MonkeyPatch, model: nn.Module, **inputs: Any) -> OptimizedModule:
    """Optimize, with the clock telling how much faster it is without the mask."""

    def raced(with_mask: tuple[str, Any], without: tuple[str, Any], *_: Any) -> Measurement:
        return Measurement(Timing(with_mask[0], (ratio,) * 8, 0.0), Timing(without[0], (1.0,) * 8, 0.0), "cpu", 1)

    monkeypatch.setattr(all_ones, "duel", raced)
    monkeypatch.setattr(steps, "_measured", lambda *_: None)  # what is right is kept
    pipeline = [refold.SimplifyAttentionMask()]
    return refold.optimize(model, inputs, level="max", backend="plain", pipeline=pipeline, progress=False)


@torch.no_grad()
def test_with_and_without_padding(monkeypatch: pytest.MonkeyPatch):
    model = Masked().eval()
    optimized = optimized_as_if(2.0, monkeypatch, model, **example())
    special = optimized.variants[0].all_ones
    assert special is not None and special.names == ("mask",)
    assert any("mask is all ones" in note and "2.00×" in note for note in optimized.report.notes)
    ids, ones = example().values()
    padded = ones.clone()
    padded[1, 3:] = 0
    for mask in (ones, padded, torch.zeros_like(ones), 2 * ones):
        assert special.applies([ids, mask]) == bool((mask == 1).all())
        torch.testing.assert_close(optimized(ids=ids, mask=mask), model(ids, mask), equal_nan=True)
    assert not optimized.notes


@torch.no_grad()
def test_it_is_the_twin_that_runs(monkeypatch: pytest.MonkeyPatch):
    optimized = optimized_as_if(2.0, monkeypatch, Masked().eval(), **example())
    ids, ones = example().values()
    special = optimized.variants[0].all_ones
    assert special is not None
    blind = special.run(ids=ids, mask=0 * ones)
    assert torch.equal(blind, optimized(ids=ids, mask=ones)), "the twin does not look at the mask"


@torch.no_grad()
def test_the_graph_that_is_shown_and_saved_has_the_mask(monkeypatch: pytest.MonkeyPatch):
    model = Masked().eval()
    optimized = optimized_as_if(2.0, monkeypatch, model, **example())
    ids, ones = example().values()
    padded = ones.clone()
    padded[0, 2:] = 0
    torch.testing.assert_close(optimized.graph_module(ids, padded), model(ids, padded))
    assert optimized.restore() is model


@torch.no_grad()
def test_changed_weights_are_used(monkeypatch: pytest.MonkeyPatch):
    model = Masked().eval()
    optimized = optimized_as_if(2.0, monkeypatch, model, **example())
    model.query.weight.mul_(3)
    torch.testing.assert_close(optimized(**example()), model(**example()))


class TwoMasks(Masked):
    def forward(self, ids: torch.Tensor, mask: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return super().forward(ids, mask * other)


@torch.no_grad()
def test_one_tensor_given_as_two_masks_is_looked_at_twice(monkeypatch: pytest.MonkeyPatch):
    ids, ones = example().values()
    model = TwoMasks().eval()
    optimized = optimized_as_if(2.0, monkeypatch, model, ids=ids, mask=ones, other=ones)
    special = optimized.variants[0].all_ones
    assert special is not None and special.names == ("mask", "other")
    padded = ones.clone()
    padded[1, 3:] = 0
    for mask, other in ((ones, ones), (ones, padded), (padded, ones)):
        torch.testing.assert_close(optimized(ids=ids, mask=mask, other=other), model(ids, mask, other))


class WeightedMask(Masked):
    """What the mask is multiplied with becomes part of a constant once the mask is known."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slope", torch.randn(6), persistent=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(ids, mask) + (mask * self.slope).sum().cos()


@torch.no_grad()
def test_a_buffer_that_became_part_of_a_constant_is_watched(monkeypatch: pytest.MonkeyPatch):
    model = WeightedMask().eval()
    optimized = optimized_as_if(2.0, monkeypatch, model, **example())
    assert optimized.variants[0].all_ones is not None
    model.slope.mul_(3)
    torch.testing.assert_close(optimized(**example()), model(**example()))


def test_nothing_is_kept_that_is_not_faster(monkeypatch: pytest.MonkeyPatch):
    optimized = optimized_as_if(0.9, monkeypatch, Masked().eval(), **example())
    assert optimized.variants[0].all_ones is None
    assert optimized.report.notes == (
        "Calls whose mask is all ones keep the attention mask: to look and drop it is 0.90×.",
    )


def test_a_twin_that_cannot_be_run_is_reported(monkeypatch: pytest.MonkeyPatch):
    def refuse(wanted: Any, *rest: Any) -> tuple[dict[str, Any], dict[str, str]]:
        rest[-1].update(dict.fromkeys(wanted, "it is broken"))
        return {}, {}

    monkeypatch.setattr(all_ones, "prepare_checked", refuse)
    optimized = optimized_as_if(2.0, monkeypatch, Masked().eval(), **example())
    assert optimized.variants[0].all_ones is None
    assert optimized.report.notes == ("Without the attention mask, plain cannot run the model: it is broken.",)


class MaskIntoValues(Masked):
    """The mask does not reach an attention."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.query(self.words(ids)) * mask[..., None]


def test_a_mask_of_something_else_is_not_worth_a_note(monkeypatch: pytest.MonkeyPatch):
    optimized = optimized_as_if(2.0, monkeypatch, MaskIntoValues().eval(), **example())
    assert optimized.variants[0].all_ones is None and not optimized.report.notes


def test_a_mask_that_does_not_verify_is_reported(monkeypatch: pytest.MonkeyPatch):
    def taken_back(gm: Any, rewrites: Any, *_: Any, **__: Any) -> list[steps.Step]:
        return [steps.Step(rewrite, "taken back", Result(""), note="It did not verify.") for rewrite in rewrites]

    monkeypatch.setattr(all_ones, "take_steps", taken_back)
    optimized = optimized_as_if(2.0, monkeypatch, Masked().eval(), **example())
    assert optimized.variants[0].all_ones is None
    assert optimized.report.notes == (
        "Dropping the attention mask where mask is all ones: taken back. It did not verify.",
    )


def test_a_mask_with_padding_in_the_example_is_no_reason(monkeypatch: pytest.MonkeyPatch):
    inputs = example()
    inputs["mask"][0, 0] = 0
    assert optimized_as_if(2.0, monkeypatch, Masked().eval(), **inputs).variants[0].all_ones is None


def test_tokens_that_happen_to_be_ones_are_no_mask(monkeypatch: pytest.MonkeyPatch):
    inputs = example() | {"ids": torch.ones(2, 6, dtype=torch.int64)}
    special = optimized_as_if(2.0, monkeypatch, Masked().eval(), **inputs).variants[0].all_ones
    assert special is not None and special.names == ("mask",)


def test_a_cpu_is_not_asked_unless_everything_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(all_ones, "duel", None)
    pipeline = [refold.SimplifyAttentionMask()]
    optimized = refold.optimize(Masked().eval(), example(), backend="plain", pipeline=pipeline, progress=False)
    assert optimized.variants[0].all_ones is None
