"""Signatures: equal for equal settings in any process, different for different ones, defined for anything."""

from __future__ import annotations

import enum
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule

import refold
from refold.rewrite.description import canonical_text, signature_of


class Settings(refold.Transformation):
    """Has settings of any kind."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


class Same(Settings):
    """Another class with the same settings."""


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Point:
    x: int
    y: int


class Slotted:
    __slots__ = ("a", "unset")

    def __init__(self, a: int) -> None:
        self.a = a


def scale(x: float, by: float = 2) -> float:
    return x * by


def returning(value: int) -> Callable[[], int]:
    return lambda: value


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3) | st.tuples(inner, inner)
    ),
    max_leaves=6,
)


@given(plain)
@settings(max_examples=100, deadline=None)
def test_equal_settings_have_one_signature(value: Any) -> None:
    import copy

    assert Settings(value).signature == Settings(copy.deepcopy(value)).signature != Same(value).signature
    assert 0 <= Settings(value).signature < 2**63


@given(plain, plain)
@settings(max_examples=200, deadline=None)
def test_different_settings_have_two(a: Any, b: Any) -> None:
    assert (canonical_text(a) == canonical_text(b)) == _same(a, b)


def _same(a: Any, b: Any) -> bool:
    """Equal in value and kind, at every depth."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return repr(a) == repr(b)


PAIRS: dict[str, tuple[Any, Any]] = {
    "kind": (1, 1.0),
    "bool": (1, True),
    "sign of zero": (0.0, -0.0),
    "tuple and list": ((1,), [1]),
    "dtype": (torch.float32, torch.float16),
    "device": (torch.device("cpu"), torch.device("meta")),
    "tensor": (torch.zeros(2), torch.tensor([0.0, -0.0])),
    "enum": (Color.RED, Color.BLUE),
    "class": (Point, Slotted),
    "dataclass": (Point(1, 2), Point(2, 1)),
    "slots": (Slotted(1), Slotted(2)),
    "lambda": (lambda x: x + 1, lambda x: x + 2),
    "closure": (returning(1), returning(2)),
    "lambda inside": (lambda: lambda: 1, lambda: lambda: 2),
    "named default": (lambda x, *, by=1: x * by, lambda x, *, by=2: x * by),
    "all arguments": (lambda *x: x, lambda x: x),
    "default": (scale, functools.partial(scale, by=3)),
    "function": (torch.relu, torch.tanh),
    "method": (Point(1, 2).__eq__, Point(2, 2).__eq__),
    "strings that look alike": (["a,b"], ["a", "b"]),
}


@pytest.mark.parametrize(("a", "b"), PAIRS.values(), ids=PAIRS)
def test_pairs_that_differ(a: Any, b: Any) -> None:
    assert signature_of(Settings(a)) != signature_of(Settings(b))
    assert signature_of(Settings(a)) == signature_of(Settings(a))


def test_sets_and_dicts_in_any_order() -> None:
    assert signature_of({1, 2, 3}) == signature_of({3, 1, 2}) and signature_of({"a": 1, "b": 2}) == signature_of(
        {"b": 2, "a": 1}
    )


def test_a_setting_that_holds_itself() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    other: list[Any] = [2]
    other.append(other)
    assert Settings(loop).signature == Settings(loop).signature != Settings(other).signature


def test_reading_it_changes_nothing() -> None:
    t = Settings({"a": [1]})
    before = dict(vars(t))
    assert t.signature == t.signature and vars(t) == before


PROGRAM = """
import torch, refold
from refold.rewrite.description import signature_of
print(refold.MergeLinears().signature, refold.compose(refold.MergeLinears(), refold.FuseBiasInLinear()).signature)
print(signature_of({"x", "y", "z"}), signature_of({"a": {1, 2}, "b": torch.float32}), signature_of(torch.arange(3)))
"""


def test_the_same_in_other_processes_under_other_hash_seeds() -> None:
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in ("1", "2")]
    outputs = [
        subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True).stdout
        for env in environments
    ]
    mine = f"{refold.MergeLinears().signature} "
    assert outputs[0] == outputs[1] and outputs[0].startswith(mine)
