"""What is switched on around a call: autocast, by kind of device. What is prepared under it is prepared for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Self

import torch

from refold.saving.store import dtype_name, dtype_of

_KINDS = ("cpu", "cuda")


@dataclass(frozen=True)
class Surroundings:
    """The dtype that autocast casts to on each kind of device where it is on."""

    autocast: tuple[tuple[str, torch.dtype], ...] = ()

    @classmethod
    def now(cls) -> Self:
        """Those that are on in this thread."""
        return cls(tuple((kind, torch.get_autocast_dtype(kind)) for kind in _KINDS if torch.is_autocast_enabled(kind)))

    @classmethod
    def from_plain(cls, data: Mapping[str, str]) -> Self:
        """Those that `plain` told of."""
        return cls(tuple((kind, dtype_of(data[kind])) for kind in _KINDS if kind in data))

    @property
    def plain(self) -> dict[str, str]:
        """The same as plain data."""
        return {kind: dtype_name(dtype) for kind, dtype in self.autocast}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The same again, whatever is on now. Casts of weights are not kept: weights may be written meanwhile."""
        casts = dict(self.autocast)
        with ExitStack() as stack:
            for kind in _KINDS:
                if kind in casts:
                    stack.enter_context(torch.autocast(kind, dtype=casts[kind], cache_enabled=False))
                elif torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            yield

    def __str__(self) -> str:
        return " and ".join(f"autocast to {str(dtype).removeprefix('torch.')}" for _, dtype in self.autocast)
