"""Integers, booleans and masks are drawn where they reach a site: defects in what is made of them show, and rewrites
that are right because of what the graph says about them stay right."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from planted_pairs import EXACT, RIGHT, WRONG, plant

from refold.record.stack import history
from refold.verification.discrete_draws import NAMES, DiscreteDraws, is_discrete
from refold.verification.integer_uses import IntegerUses, Use
from refold.verification.verifier import verify_last

DTYPES = {"given": torch.float32, "computed": torch.bfloat16}


def _planted(host: str, pair, dtype: torch.dtype, seed: int = 0):
    gm, inputs = plant(host, *pair, dtype, seed)
    assert len(history(gm)) == 1
    return verify_last(gm, inputs, outputs=False, seed=seed)


@pytest.mark.parametrize("host", DTYPES)
@pytest.mark.parametrize("name", WRONG)
def test_a_planted_defect_is_wrong(name: str, host: str):
    if name in EXACT and host != "given":
        pytest.skip("computed numbers are never equal to the last bit")
    found = _planted(host, WRONG[name], DTYPES[host])
    assert not found.right, found


@pytest.mark.parametrize("host", DTYPES)
@pytest.mark.parametrize("name", RIGHT)
def test_what_computes_the_same_is_right(name: str, host: str):
    found = _planted(host, RIGHT[name], DTYPES[host])
    assert found.right and found.sites, found


@pytest.mark.parametrize("name", ["is_causal for a window", "a size is written into the graph"])
def test_sizes_that_a_captured_graph_leaves_open_are_drawn(name: str):
    assert not _planted("captured", WRONG[name], torch.float32).right


# --- how integers are used -------------------------------------------------------------------------------------------

TABLE = torch.randn(10, 3)


@pytest.mark.parametrize(
    ("compute", "use"),
    [
        (lambda i: F.embedding(i, TABLE), Use(0, 9)),
        (lambda i: TABLE[(i + 2).reshape(-1)], Use(-2, 7)),
        (lambda i: F.embedding(9 - i, TABLE), Use(0, 9)),
        (lambda i: F.embedding((i * 3)[:, 1:], TABLE), Use(0, 3)),
        (lambda i: F.embedding(i // 4, TABLE), Use(0, 36)),
        (lambda i: F.embedding(i // 4, TABLE) + TABLE[i.flip(1)], Use(0, 9)),
        (lambda i: F.embedding(i % 10, TABLE), Use()),
        (lambda i: F.embedding(i.clamp(0, 9), TABLE), Use()),
        (lambda i: F.embedding((i > 2).long() + i.argsort(-1), TABLE), Use()),
        (lambda i: F.embedding((i.float() / 2).long(), TABLE), Use(free=False)),
        (lambda i: F.embedding(i + i.flip(1), TABLE), Use(free=False)),
        (lambda i: torch.zeros(int(i.max())), Use(free=False)),
        (lambda i: F.one_hot(i, 5), Use(0, 4, free=False, distinct=True)),  # it asks for the greatest
        (lambda i: torch.zeros(2, 10).scatter_add(1, i, torch.ones(2, 4)), Use(0, 9)),
        (lambda i: torch.zeros(2, 4, dtype=torch.long).copy_(i), Use(free=False)),
        (lambda i: torch.bincount(i.flatten()), Use(free=False)),
        (lambda i: torch.where(i == 1, i * 2, i) - 1, Use()),
    ],
)
def test_an_index_is_followed_back_to_its_input(compute, use: Use):
    ids = torch.tensor([[0, 1, 2, 3], [3, 3, 0, 0]])
    with IntegerUses([ids]) as seen:
        compute(ids.clone())
    assert seen.uses == [use]


def test_draws_are_of_the_kind_that_was_given():
    draws = DiscreteDraws([7.0], 0)
    mask, order = torch.ones(3, 6, dtype=torch.long), torch.arange(6).repeat(3, 1)
    low = torch.finfo(torch.float32).min
    added = torch.tensor([[0.0, 0.0, low], [0.0, low, low]])
    for kind in range(len(NAMES)):
        assert set(draws.draw(mask, Use(), kind).unique().tolist()) <= {0, 1}
        assert set(draws.draw(added, Use(), kind).unique().tolist()) <= {0.0, low}
        drawn = draws.draw(order, Use(0, 5, distinct=True), kind)
        assert torch.equal(drawn.sort(-1).values, order)
        bounded = draws.draw(torch.tensor([[3, 9], [4, 4]]), Use(-2, 30), kind)
        assert int(bounded.min()) >= -2 and int(bounded.max()) <= 30
    seen = {tuple(draws.mask(torch.Size((2, 6)), kind).sum(-1).tolist()) for kind in range(len(NAMES))}
    assert (0, 0) in seen and (6, 6) in seen and any(1 in counts for counts in seen), "none, all and a single place"
    assert not is_discrete(torch.randn(3)) and is_discrete(added) and is_discrete(order)
