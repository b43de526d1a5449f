"""What the rules for masks are given and return, and the table of these rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from refold.graph.values import proves_shapes
from refold.patterns.masks.formulas import Element
from refold.patterns.rule_table import RuleTable

Size = int | str | None
"""A number, the name of a symbolic size, or unknown."""

LARGEST = 1 << 26
"""Constants with more elements are not evaluated."""


@dataclass(frozen=True)
class Value:
    """A tensor: its dtype, its sizes as far as known, and its elements as a formula of indices."""

    dtype: torch.dtype
    shape: tuple[Size, ...]
    element: Element

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def axis(self, dim: int) -> int:
        """An axis, counted from the right."""
        return dim if dim < 0 else dim - self.rank


@dataclass(frozen=True)
class Operands:
    """A call: its name, and its arguments with their values in the place of nodes."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    recorded: torch.Tensor | None


RULES: RuleTable[Callable[[Operands], Value]] = RuleTable()
"""What each operator makes of its operands; a rule refuses what it does not understand."""


@dataclass(frozen=True)
class Symbol:
    """A number that is not known here: a symbolic size, with its name, or a device."""

    name: str | None = None


def recorded_shape(value: torch.Tensor) -> tuple[Size, ...]:
    """The sizes that capture recorded: numbers, or the names of symbolic ones; unknown where they hold for one run."""
    if not proves_shapes(value):
        return (None,) * value.dim()
    return tuple(size if isinstance(size, int) else str(size) for size in value.shape)
