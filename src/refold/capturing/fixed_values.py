"""Inputs whose values are written into a graph: every call is checked for them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch


class FixedValues:
    """The values at capture, by the place of the input. A tensor on a GPU that was compared is known again."""

    def __init__(self, values: Mapping[int, torch.Tensor] | None = None) -> None:
        self.values = dict(values or {})
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def complaint(self, tensors: Sequence[Any], names: Sequence[str]) -> str:
        """Which input has other values, as words; empty where all are as they were."""
        for place, value in self.values.items():
            if not self._is(tensors[place], place, value):
                was = value.tolist() if value.numel() <= 32 else f"another tensor of shape {tuple(value.shape)}"
                return f"{names[place]} steers the model's code and was {was} at capture"
        return ""

    def _is(self, tensor: Any, place: int, value: torch.Tensor) -> bool:
        if not isinstance(tensor, torch.Tensor):
            return False
        if tensor.device.type == "cpu" or tensor.is_inference():
            return torch.equal(tensor.to(value.device), value)
        # comparing waits for a GPU and cannot be done inside a CUDA graph, so the same tensor is not compared again
        seen, version = self._seen.get(place, (None, -1))
        if seen is not None and seen() is tensor and version == tensor._version:
            return True
        if not torch.equal(tensor.to(value.device), value):
            return False
        self._seen[place] = (weakref.ref(tensor), tensor._version)
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return FixedValues, (self.values,)
