"""Every registered rewrite keeps every law, on its own examples."""

from __future__ import annotations

import functools

import pytest

import refold.transformations
from refold.examples import Example
from refold.rewrite.registry import registered
from refold.rewrite.rule import Rewrite
from refold.testing import LAWS, check_law, check_laws, check_new_process
from refold.testing.laws import can_be_pickled, graph_of

REWRITES = sorted({c for c in registered() if c.__module__.startswith("refold.")}, key=lambda c: c.__name__)
FOLDS = [c for c in REWRITES if "keep" in getattr(c, "__dataclass_fields__", {})]
INSTANCES = [*(c() for c in REWRITES), *(c(keep="original") for c in FOLDS)]  # type: ignore[call-arg]


@functools.cache
def examples_of(rewrite: type[Rewrite]) -> list[Example]:
    """The examples of a rule, captured once: each law works on copies."""
    return list(rewrite.examples())


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("rewrite", INSTANCES, ids=repr)
def test_keeps(rewrite: Rewrite, law: str) -> None:
    examples = examples_of(type(rewrite))
    assert examples, f"{type(rewrite).__name__} has no examples"
    if law == "L5" and not any(can_be_pickled(graph_of(model)) for model, _ in examples):
        pytest.skip("torch can pickle none of the examples, rewritten or not")
    for place, (model, inputs) in enumerate(examples):
        check_law(LAWS[law], rewrite, model, inputs, f"example {place}")


def test_undo_in_a_new_process_under_another_hash_seed() -> None:
    check_new_process([(t, model, inputs) for t in INSTANCES for model, inputs in examples_of(type(t))])


def test_check_laws_runs_them_all() -> None:
    from refold.examples import attention_layers

    check_laws(refold.ChangeTrueDivToMulByInverse(), [attention_layers.attention()])
