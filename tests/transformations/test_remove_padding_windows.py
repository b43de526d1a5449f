"""RemovePadding where a model goes on without its first or last positions, as those do that score the next words."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import refold
from refold import RemovePadding
from tests.transformations.test_remove_padding import F64, KINDS, Model, by_keys, deviation, padded, plans, trace


def next_words(x: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    told = x[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None] % x.shape[-1])
    return (told[..., 0] * mask[:, 1:]).sum(1)


def last_words(x: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return (x[:, 1:].softmax(-1).square() * mask[:, 1:, None]).sum(1)


def inner_words(x: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    inner = x[:, 1:][:, :-1].softmax(-1)
    return (inner * (mask[:, :-2] * mask[:, 2:])[..., None]).sum(1) / inner.shape[1]


def with_neighbours(x: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return ((x[:, 1:].softmax(-1) - x[:, :-1].softmax(-1)) * (mask[:, 1:] * mask[:, :-1])[..., None]).sum(1)


def as_one_list(x: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    rows, length = ids.shape
    told = x[:, :-1].reshape(-1, x.shape[-1]).log_softmax(-1).reshape(rows, length - 1, -1)
    return (told * mask[:, 1:, None]).sum(1)


HEADS = {head.__name__: head for head in (next_words, last_words, inner_words, with_neighbours, as_one_list)}


def computed(gm: Any, target: str, ids: torch.Tensor, mask: torch.Tensor) -> list[int]:
    """For how many places the calls of an operator compute something."""
    found: list[int] = []

    class Watching(torch.fx.Interpreter):
        def run_node(self, n: Any) -> Any:
            value = super().run_node(n)
            if target in str(n.target):
                found.append(value.shape[:-1].numel())
            return value

    with torch.no_grad():
        Watching(gm).run(ids, mask)
    return found


@pytest.mark.parametrize("name", HEADS)
def test_the_same_numbers_for_every_mask(name: str) -> None:
    torch.manual_seed(0)
    model = Model(by_keys, HEADS[name]).to(F64)
    gm = trace(copy.deepcopy(model))
    RemovePadding()(gm)
    assert len(plans(gm)) == 1, str(refold.result(gm))
    for kind in KINDS:
        for length in (9, 17):
            assert deviation(model, gm, kind, length) < 1e-14, kind


@pytest.mark.parametrize("name", ["next_words", "last_words", "with_neighbours"])
def test_what_follows_runs_on_real_tokens_alone(name: str) -> None:
    torch.manual_seed(0)
    gm = trace(Model(by_keys, HEADS[name]).to(F64))
    RemovePadding()(gm)
    mask, ids = padded("right", 17), torch.randint(0, 32, (4, 17))
    places = computed(gm, "softmax", ids, mask)
    assert places and set(places) == {int(mask.sum())}


def test_scores_of_next_words_need_padding_on_the_right() -> None:
    """With padding on the left, the first word is told from a place that is none."""
    gm = trace(Model(by_keys, next_words).to(F64))
    RemovePadding()(gm)
    ids = torch.randint(0, 32, (4, 17))
    assert computed(gm, "softmax", ids, padded("left", 17)) == [4 * 17]


def test_gradients() -> None:
    torch.manual_seed(0)
    model = Model(by_keys, next_words).to(F64)
    gm = trace(copy.deepcopy(model))
    RemovePadding()(gm)
    ids, mask = torch.randint(0, 32, (4, 17)), padded("right", 17)
    for module in (model, gm):
        module(ids, mask).sum().backward()
    for name, parameter in gm.named_parameters():
        expected = model.get_parameter(name).grad
        assert (parameter.grad is None) is (expected is None)
        assert expected is None or torch.allclose(parameter.grad, expected, rtol=0, atol=1e-12), name


def test_such_values_are_not_given_out_as_zeros() -> None:
    gm = trace(Model(by_keys, lambda x, mask, ids: x[:, :-1].softmax(-1)).to(F64))
    RemovePadding(padding="zeros")(gm)
    assert not plans(gm) and "which is no value for each token" in str(refold.result(gm))
