"""Outputs put together by hand are those that their classes make."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPooling, CausalLMOutputWithPast
from transformers.utils import ModelOutput

from refold.executors.assembly import assembler
from refold.executors.tree import Layout


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Counted(ModelOutput):
    """Computes a field from a tensor whenever it is made: nothing that could be copied from an example."""

    x: torch.Tensor | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        self.rows = None if self.x is None else len(self.x)
        super().__post_init__()


def tensor(value: float) -> torch.Tensor:
    return torch.full((2,), value)


QUICK = {
    "two fields": BaseModelOutputWithPooling(last_hidden_state=tensor(1), pooler_output=tensor(2)),
    "a field in the middle is None": CausalLMOutputWithPast(loss=None, logits=tensor(1), attentions=(tensor(2),)),
    "the first field alone": BaseModelOutputWithPooling(last_hidden_state=tensor(1)),
    "hidden states": BaseModelOutputWithPooling(last_hidden_state=tensor(1), hidden_states=(tensor(2), tensor(3))),
    "one output in another": CausalLMOutputWithPast(
        logits=tensor(1), hidden_states=BaseModelOutputWithPooling(pooler_output=tensor(2))
    ),
    "plain containers": {"a": [tensor(1), 3, None], "b": (tensor(2), {"c": "text", "d": []})},
    "a call": ((tensor(1),), {"x": tensor(2), "flag": True}),
    "a tensor": tensor(1),
}


def same(mine: Any, its: Any) -> bool:
    """The same classes, keys in the same order, attributes and tensors."""
    if type(mine) is not type(its):
        return False
    if isinstance(mine, torch.Tensor):
        return mine is its
    if isinstance(mine, dict):
        keys = list(OrderedDict.keys(mine) if isinstance(mine, OrderedDict) else mine)
        values = all(same(mine[key], its[key]) for key in keys)
        attributes = same(vars(mine), vars(its)) if hasattr(mine, "__dict__") else True
        return keys == list(its) and values and attributes
    if isinstance(mine, list | tuple):
        return len(mine) == len(its) and all(map(same, mine, its))
    return bool(mine == its)


@pytest.mark.parametrize("name", QUICK)
def test_it_makes_what_the_layout_makes_without_asking_it(name: str) -> None:
    layout, tensors = Layout.of_output(QUICK[name])
    make = assembler(layout)
    assert make != layout.fill
    others = [torch.rand(3) for _ in tensors]
    assert same(make(others), layout.fill(others))
    assert not others or not same(make(others), layout.fill(tensors))


def test_a_model_output_is_one_in_every_use() -> None:
    layout, tensors = Layout.of_output(QUICK["two fields"])
    made = assembler(layout)(tensors)
    assert made.last_hidden_state is made["last_hidden_state"] is made[0] is tensors[0]
    assert [value is tensor for value, tensor in zip(made.to_tuple(), tensors, strict=True)] == [True, True]
    assert made.hidden_states is None and "hidden_states" not in made
    made.pooler_output = tensors[0]
    assert made[1] is tensors[0]
    flat, _ = torch.utils._pytree.tree_flatten(made)
    assert flat == [tensors[0], tensors[0]]


def test_containers_are_new_at_every_call() -> None:
    layout, tensors = Layout.of_output(QUICK["plain containers"])
    make = assembler(layout)
    first, second = make(tensors), make(tensors)
    first["b"][1]["d"].append(1)
    assert second["b"][1]["d"] == [] and make(tensors)["b"][1]["d"] == []


def test_classes_with_ways_of_their_own_are_made_by_themselves() -> None:
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), 0)
    for value in (Counted(x=tensor(1)), Pair(tensor(1), tensor(2)), CausalLMOutputWithPast(past_key_values=cache)):
        layout, _ = Layout.of_output(value)
        assert assembler(layout) == layout.fill


def test_a_field_that_is_computed_follows_its_tensor() -> None:
    layout, _ = Layout.of_output(Counted(x=tensor(1)))
    assert assembler(layout)([torch.ones(5), torch.ones(())][: layout.size]).rows == 5
