"""Weights as they were seen once, and whether they still look the same.

Torch counts what is written into a tensor, but not what is written through its `.data`, nor into tensors that were
made in inference mode, nor memory that is given to it by `.data = other`. Adapters are merged in these ways, and
averaged weights swapped in. So it is also looked where each weight lies, and at one entry of it. On other devices than
the CPU an entry would have to be waited for: there it is not looked at.
"""

from __future__ import annotations

import ctypes
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import nn

from refold import fx_private

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_BITS: dict[int, Literal["b", "h", "i", "q"]] = {1: "b", 2: "h", 4: "i", 8: "q"}


class Sighting:
    """Where weights lay, and the contents of those that were copied. It is asked at every call of an optimized model,
    so it is quick."""

    def __init__(self, weights: list[torch.Tensor], copied: list[torch.Tensor]) -> None:
        self._weights, self.copied = weights, copied
        self._places = fx_private.addresses_of(weights)
        self._counts = fx_private.versions_of(copied)
        self._entries: _Entries | None = _Entries(copied)
        self._values = self._entries.values()

    @property
    def watches(self) -> int:
        """How many weights are looked at for their contents."""
        return len(self.copied)

    def still_there(self) -> bool:
        """Whether all weights lie where they lay."""
        return fx_private.addresses_of(self._weights) == self._places

    def still_holds(self) -> bool:
        """Whether all weights lie where they lay, with the contents that were copied."""
        if fx_private.versions_of(self.copied) != self._counts or not self.still_there():
            self._entries = None  # memory that nobody uses any more is not held
            return False
        entries = self._entries  # other threads ask too
        if entries is None:
            entries = self._entries = _Entries(self.copied)
        return entries.values() == self._values

    def same_contents(self) -> bool:
        """Whether the contents are those that were copied, wherever they lie now."""
        return fx_private.versions_of(self.copied) == self._counts and _Entries(self.copied).values() == self._values


class _Entries:
    """The entry in the middle of each plain tensor on the CPU, read from its own memory, which is held. All entries of
    one width are picked from one array that reaches from the first to the last of them; what lies between is not
    touched."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        readable = [tensor for tensor in tensors if _can_be_read(tensor)]
        self._held = [tensor.untyped_storage() for tensor in readable]
        by_width: dict[int, list[int]] = {}
        for tensor in readable:
            by_width.setdefault(_width(tensor), []).append(_middle(tensor))
        self._groups = [_reader(width, places) for width, places in by_width.items()]

    def values(self) -> list[Any]:
        return [read(memory) for read, memory in self._groups]


def _reader(width: int, places: list[int]) -> tuple[itemgetter[Any], memoryview]:
    """What picks the entries, and memory to pick them from."""
    first = min(places)
    memory = (ctypes.c_byte * (max(places) - first + width)).from_address(first)
    return itemgetter(*((place - first) // width for place in places)), memoryview(memory).cast("B").cast(_BITS[width])


def _can_be_read(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in _PLAIN and tensor.device.type == "cpu" and tensor.layout is torch.strided
    address = fx_private.address_of(tensor) if is_plain and tensor.numel() > 0 else None
    return address is not None and address > 0 and address % _width(tensor) == 0


def _width(tensor: torch.Tensor) -> int:
    """How many bytes of an entry are read."""
    return min(tensor.element_size(), 8)


def _middle(tensor: torch.Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.data_ptr() + tensor.element_size() * sum(size // 2 * stride for size, stride in steps)
