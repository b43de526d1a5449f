"""Which sizes of calls something is recorded for: those that come again, the least recently used of them goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Recording = TypeVar("_Recording")
_MOST_SEEN = 10_000  # sizes that are counted before counting begins anew


class RecordedSizes(Generic[_Recording]):
    """At most so many recordings, each made when its sizes are seen for the n-th time. Sizes whose recording had to go
    must be seen twice as often before they are recorded again, so that many sizes do not drive each other out."""

    def __init__(self, most: int, sightings: int) -> None:
        self.most = most
        self.recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._sightings = sightings
        self._seen: dict[Hashable, int] = {}
        self._needed: dict[Hashable, int] = {}

    def find(self, sizes: Hashable, record: Callable[[], _Recording]) -> _Recording | None:
        """What is recorded for these sizes, recorded now if they have come often enough."""
        found = self.recordings.get(sizes)
        if found is not None:
            if len(self.recordings) > 1:
                self.recordings.move_to_end(sizes)
            return found
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen[sizes] = self._seen.get(sizes, 0) + 1
        if self._seen[sizes] < self._needed.get(sizes, self._sightings):
            return None
        try:
            return self.add(sizes, record())
        except Exception:
            self._postpone(sizes)
            raise

    def add(self, sizes: Hashable, recording: _Recording) -> _Recording:
        """Keep a recording; the one that was not used for longest goes where there are too many."""
        self.recordings[sizes] = recording
        while len(self.recordings) > self.most:
            self.forget_oldest()
        return recording

    def forget_oldest(self) -> None:
        """Give up the recording that was not used for longest."""
        self._postpone(self.recordings.popitem(last=False)[0])

    def forget_all(self) -> bool:
        """Give up all recordings; whether there were some."""
        held = bool(self.recordings)
        while self.recordings:
            self.forget_oldest()
        return held

    def _postpone(self, sizes: Hashable) -> None:
        self._needed[sizes] = 2 * self._needed.get(sizes, self._sightings)
        self._seen.pop(sizes, None)
