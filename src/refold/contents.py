"""What the lists, dicts and sets among a module's attributes hold: photographed, compared, and put back in place.

A reference does not tell whether a container was written into. Torch writes into its own (tables, hooks, names of
buffers), and transformations that others wrote may write into any.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import eq, is_
from typing import Any

KINDS = frozenset({dict, OrderedDict, defaultdict, list, set, deque})
"""Containers that are followed: just these types, because a subclass may do anything when it is copied or filled."""


@dataclass(frozen=True)
class Contents:
    """Stands, in a record, for what a container held that was written into; the container itself stays."""

    value: Any

    def put_into(self, attributes: dict[str, Any], name: str) -> None:
        """Let the container of this name hold again what it held; make one if it is gone."""
        if type(attributes.get(name)) is type(self.value):
            _fill_all(attributes[name], self.value)
        else:
            attributes[name] = _copy_all(self.value)


_DICTS = frozenset({dict, OrderedDict, defaultdict})
_BATCH = 64
_NESTING = KINDS | {tuple}
"""What may have containers inside."""


class Holdings:
    """Containers, each with a copy of what it holds now."""

    def __init__(self, containers: Iterable[Any]) -> None:
        self.live = list(containers)
        self.copies = [container.copy() for container in self.live]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return zip(self.live, self.copies, strict=True)

    def written(self) -> list[Any]:
        """Those that hold something else by now."""
        if self._are_dicts_as_they_were():
            return []
        return [container for container, copy in self if not holds_just(container, copy)]

    def by_id(self) -> dict[int, Any]:
        """The copies, by the ids of the containers."""
        return dict(zip(map(id, self.live), self.copies, strict=True))

    def _are_dicts_as_they_were(self) -> bool:
        """Whether all are dicts, as they nearly always are, and hold the same."""
        return set(map(type, self.live)) <= _DICTS and hold_the_same(self.live, self.copies)

    def restore(self) -> None:
        """Let all of them hold what they held."""
        for container, copy in self:
            if not holds_just(container, copy):
                fill(container, copy)


def hold_the_same(dicts: Sequence[dict[Any, Any]], others: Sequence[dict[Any, Any]]) -> bool:
    """Whether every dict has the very objects of its partner, under the same keys in the same order. There are many, so
    there is no step of the interpreter for each."""
    return all(_hold_the_same(dicts[batch], others[batch]) for batch in batches(len(dicts)))


def _hold_the_same(dicts: Sequence[dict[Any, Any]], others: Sequence[dict[Any, Any]]) -> bool:
    if list(map(len, dicts)) != list(map(len, others)):
        return False
    if list(chain.from_iterable(dicts)) != list(chain.from_iterable(others)):
        return False
    now, then = (chain.from_iterable(map(dict.values, side)) for side in (dicts, others))
    return all(map(is_, now, then))


def batches(count: int) -> list[slice]:
    """Parts of a long list. One part, with all that hangs on it, stays in the processor's cache while it is gone
    through several times."""
    return [slice(start, start + _BATCH) for start in range(0, count, _BATCH)]


def places_that_differ(dicts: list[dict[Any, Any]], others: list[dict[Any, Any]]) -> list[int]:
    """Where dicts in a list do not hold just what their partners hold. Most do, and most others differ in size."""
    sizes, other_sizes = list(map(len, dicts)), list(map(len, others))
    same_size = list(map(eq, sizes, other_sizes))
    if hold_the_same(list(compress(dicts, same_size)), list(compress(others, same_size))):
        return [place for place, same in enumerate(same_size) if not same]
    return [place for place in range(len(dicts)) if not holds_just(dicts[place], others[place])]


def inside(containers: list[Any]) -> list[Any]:
    """The containers inside these containers, at any depth."""
    pending = [entry for container in containers for entry in _entries(container) if type(entry) in _NESTING]
    if not pending:
        return []  # as nearly always
    known = set(map(id, containers))
    found = []
    while pending:
        value = pending.pop()
        if type(value) is tuple:
            pending += value
        elif type(value) in KINDS and id(value) not in known:
            known.add(id(value))
            found.append(value)
            pending += _entries(value)
    return found


def _entries(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def holds_just(container: Any, copy: Any) -> bool:
    """Whether a container holds the very objects that a copy of it holds, in the same order."""
    if len(container) != len(copy):
        return False
    if isinstance(container, dict):
        return list(container) == list(copy) and all(map(is_, container.values(), copy.values()))
    if isinstance(container, set):
        return set(map(id, container)) == set(map(id, copy))
    return all(map(is_, container, copy))


def fill(container: Any, entries: Any) -> None:
    """Let a container hold just these entries."""
    container.clear()
    if isinstance(container, dict | set):
        container.update(entries)
    else:
        container.extend(entries)


def as_it_was(container: Any, former: Mapping[int, Any]) -> Any:
    """A container as it was when it was photographed; it and the containers inside are copies. `former` has what they
    held, by their ids."""
    return _copy_all(container, former)


def _copy_all(value: Any, former: Mapping[int, Any] | None = None, made: dict[int, Any] | None = None) -> Any:
    """A copy of a container and of those inside it; what is no container is shared. `former` has what containers held,
    where that is not what they hold now; one that was photographed and is not in it was empty."""
    made = {} if made is None else made
    if type(value) is tuple:
        return tuple(_copy_all(v, former, made) for v in value)
    if type(value) not in KINDS:
        return value
    if id(value) not in made:
        held = value if former is None else former.get(id(value), ())
        made[id(value)] = twin = value.copy()
        twin.clear()
        if isinstance(held, dict):
            twin.update({k: _copy_all(v, former, made) for k, v in held.items()})
        else:
            fill(twin, [_copy_all(v, former, made) for v in held])
    return made[id(value)]


def _fill_all(live: Any, wanted: Any, seen: tuple[int, ...] = ()) -> None:
    """Let a container hold what another holds; containers inside that stand in the same place are filled, too, and not
    replaced."""
    if isinstance(live, set):
        fill(live, wanted)
        return
    inner = (*seen, id(live))
    places = live.keys() & wanted.keys() if isinstance(live, dict) else range(min(len(live), len(wanted)))
    kept = {place: live[place] for place in places if _fits(live[place], wanted[place], inner)}
    for place, container in kept.items():
        _fill_all(container, wanted[place], inner)
    if isinstance(live, dict):
        fill(live, {k: kept[k] if k in kept else _copy_all(v) for k, v in wanted.items()})
    else:
        fill(live, [kept[i] if i in kept else _copy_all(v) for i, v in enumerate(wanted)])


def _fits(live: Any, wanted: Any, seen: tuple[int, ...]) -> bool:
    return type(live) in KINDS and type(live) is type(wanted) and id(live) not in seen
