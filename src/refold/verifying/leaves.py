"""Values that models take and give, as trees: their tensors and other leaves, with names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from refold.fingerprint import same_bits

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice, type(...))


def leaves_of(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its name: `logits`, `hidden_states[3]`. Objects of unknown classes are opened by attribute, each
    once; a container that is there twice has its leaves twice, whether it is one container or two that are equal."""
    yield from _walk(value, name, frozenset(), set())


def _walk(value: Any, name: str, around: frozenset[int], opened: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor) or (isinstance(value, _PLAIN) and not hasattr(value, "_fields")):
        yield name, value
        return
    items = _items(value)
    parts = _attributes(value) if items is None else items
    if parts is None:
        yield name, value
        return
    if id(value) in (opened if items is None else around):
        return
    opened.add(id(value))
    for key, part in parts:
        text = f"{name}.{key}" if name and isinstance(key, str) else f"{name}[{key}]" if name else str(key)
        yield from _walk(part, text, around | {id(value)}, opened)


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def _attributes(value: Any) -> list[tuple[Any, Any]] | None:
    attributes = getattr(value, "__dict__", None)
    return None if callable(value) or not attributes else [(k, v) for k, v in attributes.items() if k[:1] != "_"]


def same_leaves(one: Any, other: Any) -> bool:
    """Whether two values have the same leaves under the same names, tensors bit for bit."""
    mine, its = list(leaves_of(one)), list(leaves_of(other))
    pairs = zip(mine, its, strict=False)
    return len(mine) == len(its) and all(name == other_name and _same(a, b) for (name, a), (other_name, b) in pairs)


def _same(a: Any, b: Any) -> bool:
    both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return same_bits(a, b) if both else bool(a == b)


def tensors_in(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor with its name."""
    return ((name, leaf) for name, leaf in leaves_of(value) if isinstance(leaf, torch.Tensor))


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same containers with other tensors; objects of unknown classes stay as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(v, change) for v in value))
    if isinstance(value, torch.Size):
        return value
    if type(value) in (tuple, list):
        return type(value)(map_tensors(v, change) for v in value)
    if type(value) is dict:
        return {k: map_tensors(v, change) for k, v in value.items()}
    return value
