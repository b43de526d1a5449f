"""Every classic rewrite, alone and all together, on random mixtures of blocks and traps."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

import refold
from refold import (
    ChangeTrueDivToMulByInverse,
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    FuseBiasInLinear,
    MergeLinears,
    Transformation,
    compose,
)
from refold.rewrite.rule import Example
from refold.testing import LAWS, check_law
from refold.testing.laws import graph_of
from refold.testing.random_models import random_models

CLASSIC: list[Transformation] = [
    MergeLinears(),
    FuseBiasInLinear(),
    ChangeTrueDivToMulByInverse(),
    FuseBatchNorm2dInConv2d(),
    FuseBatchNorm1dInLinear(),
]
ALL = compose(*CLASSIC)
CHECKED = ("L2", "L3", "L4", "L5", "L7", "L9", "L11", "L13", "L14")


@pytest.mark.parametrize("t", [*CLASSIC, ALL], ids=repr)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(example=random_models())
def test_laws_hold(t: Transformation, example: Example) -> None:
    model, inputs = example
    gm = t(graph_of(model))
    fired = bool(refold.history(gm))
    if fired:
        refold.undo(gm, None)
    for law in CHECKED if fired else ("L1", "L2", "L7"):
        check_law(LAWS[law], t, model, inputs)
