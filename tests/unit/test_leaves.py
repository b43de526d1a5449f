"""The leaves of a value, with their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from refold.verifying.leaves import leaves_of, same_leaves


class Thing:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


@dataclass
class Sized:
    sizes: tuple[tuple[int, int], ...]


def names(value: Any) -> list[str]:
    return [name for name, _ in leaves_of(value)]


def test_a_container_that_is_there_twice_has_its_leaves_twice() -> None:
    small = (7, 7)
    one, other = Sized((small, small)), Sized((small, tuple(iter(small))))
    assert one.sizes[0] is one.sizes[1] and other.sizes[0] is not other.sizes[1]
    assert names(one) == names(other) == ["sizes[0][0]", "sizes[0][1]", "sizes[1][0]", "sizes[1][1]"]
    assert same_leaves(one, other)
    assert not same_leaves(one, Sized((small, (7, 8))))
    assert not same_leaves(one, Sized((small,)))


def test_values_that_cannot_be_opened_are_leaves_each_time() -> None:
    assert names([len, len]) == ["0", "1"]


def test_what_holds_itself_ends() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    assert names(endless) == ["0"]
    thing = Thing(torch.ones(1))
    thing.again = [thing, thing]  # type: ignore[attr-defined]
    assert names(thing) == ["inside"]


def test_objects_that_know_each_other_are_opened_once() -> None:
    things = [Thing(index) for index in range(30)]
    for thing in things:
        thing.others = things  # type: ignore[attr-defined]
    assert len(names(things)) == 30
