"""Sizes that come again are recorded, within bounds, and many sizes do not drive each other out."""

from __future__ import annotations

import pytest

from refold.executors.recorded_sizes import RecordedSizes


def sightings_until_recorded(sizes: RecordedSizes[str], key: str) -> int:
    for count in range(1, 20):
        if sizes.find(key, lambda: key) is not None:
            return count
    raise AssertionError("never recorded")


def test_sizes_are_recorded_at_their_third_sighting() -> None:
    sizes: RecordedSizes[str] = RecordedSizes(2, 3)
    assert [sizes.find("a", lambda: "graph of a") for _ in range(4)] == [None, None, "graph of a", "graph of a"]


def test_the_least_recently_used_goes_and_must_be_seen_twice_as_often() -> None:
    sizes: RecordedSizes[str] = RecordedSizes(2, 3)
    for key in "ab":
        sightings_until_recorded(sizes, key)
    sizes.find("a", lambda: "a")
    assert sightings_until_recorded(sizes, "c") == 3
    assert list(sizes.recordings) == ["a", "c"], "b was not used for longest"
    assert sightings_until_recorded(sizes, "b") == 6
    assert list(sizes.recordings) == ["c", "b"]
    assert sightings_until_recorded(sizes, "a") == 6


def test_a_recording_that_fails_is_tried_again_later() -> None:
    sizes: RecordedSizes[str] = RecordedSizes(2, 1)

    def fail() -> str:
        raise MemoryError

    with pytest.raises(MemoryError):
        sizes.find("a", fail)
    assert sightings_until_recorded(sizes, "a") == 2


def test_all_can_be_given_back() -> None:
    sizes: RecordedSizes[str] = RecordedSizes(2, 1)
    for key in "ab":
        sightings_until_recorded(sizes, key)
    assert sizes.forget_all() and not sizes.recordings and not sizes.forget_all()
    assert sightings_until_recorded(sizes, "a") == 2
