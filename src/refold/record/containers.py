"""What the lists, dicts and sets among a module's attributes hold: copied, compared, and put back in place.

A reference does not show whether a container was written into. Torch writes into its own (tables, hooks, names of
buffers), and transformations that others wrote may write into any.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

KINDS = frozenset({dict, OrderedDict, defaultdict, list, set, deque})
"""Containers that are followed: just these types, because a subclass may do anything when it is copied or filled."""


@dataclass(frozen=True)
class FormerItems:
    """Stands, in a record, for what a container held that was written into; the container itself stays."""

    value: Any

    def restore_into(self, attributes: dict[str, Any], name: str) -> None:
        """Let the container of this name hold again what it held; make one if it is gone."""
        if type(attributes.get(name)) is type(self.value):
            _fill_all(attributes[name], self.value)
        else:
            attributes[name] = copy_nested(self.value)


_NESTING = KINDS | {tuple}
"""What may have containers inside."""


class ContainerCopies:
    """Containers, each with a copy of what it holds now."""

    def __init__(self, containers: Iterable[Any]) -> None:
        self.live = list(containers)
        self.copies = [container.copy() for container in self.live]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return zip(self.live, self.copies, strict=True)

    def written(self) -> list[Any]:
        """Those that hold something else by now."""
        return [container for container, copy in self if not same_items(container, copy)]

    def by_id(self) -> dict[int, Any]:
        """The copies, by the ids of the containers."""
        return dict(zip(map(id, self.live), self.copies, strict=True))

    def restore(self) -> None:
        """Let all of them hold what they held."""
        for container, copy in self:
            if not same_items(container, copy):
                fill(container, copy)


def inside(containers: list[Any]) -> list[Any]:
    """The containers inside these containers, at any depth."""
    pending = [entry for container in containers for entry in _entries(container) if type(entry) in _NESTING]
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


def same_items(container: Any, copy: Any) -> bool:
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


def copy_nested(value: Any, former: Mapping[int, Any] | None = None, made: dict[int, Any] | None = None) -> Any:
    """A copy of a container and of those inside it; what is no container is shared. `former` has, by their ids, what
    containers held when they were copied before: the copy holds that, and one that is not in it was empty."""
    made = {} if made is None else made
    if type(value) is tuple:
        return tuple(copy_nested(v, former, made) for v in value)
    if type(value) not in KINDS:
        return value
    if id(value) not in made:
        held = value if former is None else former.get(id(value), ())
        made[id(value)] = new = value.copy()
        new.clear()
        if isinstance(held, dict):
            new.update({k: copy_nested(v, former, made) for k, v in held.items()})
        else:
            fill(new, [copy_nested(v, former, made) for v in held])
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
        fill(live, {k: kept[k] if k in kept else copy_nested(v) for k, v in wanted.items()})
    else:
        fill(live, [kept[i] if i in kept else copy_nested(v) for i, v in enumerate(wanted)])


def _fits(live: Any, wanted: Any, seen: tuple[int, ...]) -> bool:
    return type(live) in KINDS and type(live) is type(wanted) and id(live) not in seen
