"""Nested values put together at every call, without the checks that their classes make every time.

A `ModelOutput` of transformers looks through its fields three times while it is made, which shows in small models. What
it is made into depends only on which of its fields are None, so one is made as an example, and the next ones get the
same attributes and items. Classes with ways of their own are made by themselves.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from .tree import CONSTANTS, Layout

Make = Callable[[Sequence[torch.Tensor]], Any]


class _MadeByItself(Exception):
    """A class with a way of its own."""


def assembler(layout: Layout) -> Make:
    """Something that makes what `layout.fill` makes, at least as quickly."""
    places = [torch.empty(0) for _ in range(layout.size)]
    try:
        return _maker(layout.fill(places), {id(place): index for index, place in enumerate(places)})
    except _MadeByItself:
        return layout.fill


def _maker(example: Any, places: dict[int, int]) -> Make:
    cls = type(example)
    if id(example) in places:
        return itemgetter(places[id(example)])
    if isinstance(example, CONSTANTS):
        return lambda _: example
    if cls in (tuple, list):
        parts = [_maker(part, places) for part in example]
        return lambda tensors: cls([part(tensors) for part in parts])
    if cls is dict:
        values = {key: _maker(value, places) for key, value in example.items()}
        return lambda tensors: {key: value(tensors) for key, value in values.items()}
    if _is_model_output(example):
        return _model_output_maker(example, places)
    raise _MadeByItself


def _is_model_output(example: Any) -> bool:
    base = getattr(sys.modules.get("transformers.utils.generic"), "ModelOutput", None)
    if base is None or not isinstance(example, base) or type(example).__post_init__ is not base.__post_init__:
        return False
    return all(vars(example).get(key) is value for key, value in example.items())


def _model_output_maker(example: Any, places: dict[int, int]) -> Make:
    cls, keys, attributes = type(example), list(example), vars(example).copy()
    direct = [(name, places[id(value)]) for name, value in attributes.items() if id(value) in places]
    others = {name: value for name, value in attributes.items() if id(value) not in places}
    nested = [(name, _maker(value, places)) for name, value in others.items() if not isinstance(value, CONSTANTS)]
    new, put = OrderedDict.__new__, OrderedDict.__setitem__

    def make(tensors: Sequence[torch.Tensor]) -> Any:
        made = new(cls)
        state = made.__dict__
        state.update(attributes)
        for name, place in direct:
            state[name] = tensors[place]
        for name, maker in nested:
            state[name] = maker(tensors)
        for key in keys:
            put(made, key, state[key])
        return made

    return make
