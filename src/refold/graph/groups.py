"""Names that belong together, found from groups that overlap."""

from __future__ import annotations

from collections.abc import Iterable


def connected(groups: Iterable[Iterable[str]]) -> list[set[str]]:
    """The groups joined wherever two of them share a name, in the order in which their names first come."""
    leader: dict[str, str] = {}

    def find(name: str) -> str:
        leader.setdefault(name, name)
        while leader[name] != name:
            leader[name] = name = leader[leader[name]]
        return name

    for group in groups:
        names = list(group)
        for name in names:
            leader[find(name)] = find(names[0])
    found: dict[str, set[str]] = {}
    for name in leader:
        found.setdefault(find(name), set()).add(name)
    return list(found.values())
