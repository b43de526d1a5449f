"""The processes among which a conversion is divided: one, or those that torchrun started, on one file system."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from refold.errors import RefoldError, SaveError

_LONGEST_WAIT = timedelta(days=7)
Exchange = Callable[[str], list[str]]
"""Gives a word to all processes, and returns what each of them gave."""


@dataclass(frozen=True)
class Ranks:
    """This process among all of them."""

    rank: int = 0
    count: int = 1
    exchange: Exchange = field(default=lambda word: [word], repr=False, compare=False)

    @property
    def leads(self) -> bool:
        """Whether this is the one that begins and finishes the work, and tells about it."""
        return self.rank == 0

    def share(self, sizes: Sequence[int]) -> list[int]:
        """The places of the pieces that this process does: the large ones first, each to whoever has least."""
        loads, mine = [0] * self.count, []
        for place in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
            least = min(range(self.count), key=lambda r: (loads[r], r))
            loads[least] += sizes[place]
            if least == self.rank:
                mine.append(place)
        return sorted(mine)

    def agree(self, error: BaseException | None = None) -> None:
        """Wait for the others. If one of them failed, all do, and say why."""
        told = self.exchange("" if error is None else str(error) or type(error).__name__)
        failed = next(((rank, why) for rank, why in enumerate(told) if why), None)
        if error is None and failed is not None:
            raise SaveError(f"rank {failed[0]} failed: {failed[1]}")
        if error is not None:
            raise error

    @contextmanager
    def together(self) -> Iterator[None]:
        """A step that all processes take; it ends when all have ended it, and fails in all if it fails in one."""
        failure: BaseException | None = None
        try:
            yield
        except (RefoldError, OSError) as error:
            failure = error
        self.agree(failure)


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """This process among those that torchrun started; alone where it started none."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1 or "RANK" not in os.environ:
        yield Ranks()
        return
    import torch.distributed as dist

    store, rank, count = next(iter(dist.rendezvous("env://", timeout=_LONGEST_WAIT)))
    store.set_timeout(_LONGEST_WAIT)
    exchange = _through(store, rank, count)
    try:
        yield Ranks(rank, count, exchange)
    finally:
        _leave(store, rank, count)


def _through(store: Any, rank: int, count: int) -> Exchange:
    """Words go through the store at which the processes meet; no tensor moves, so no process group is needed."""
    rounds = itertools.count()

    def exchange(word: str) -> list[str]:
        number = next(rounds)
        store.set(f"refold/{number}/{rank}", word)
        return [store.get(f"refold/{number}/{other}").decode() for other in range(count)]

    return exchange


def _leave(store: Any, rank: int, count: int) -> None:
    """The leading process may be the one that holds the store, so it leaves last."""
    store.set(f"refold/left/{rank}", "")
    if rank == 0 and sys.exc_info()[0] is None:
        store.wait([f"refold/left/{other}" for other in range(count)])
