"""Which nodes of the final graph come from which nodes of the original one, followed through every change."""

from __future__ import annotations

from collections import defaultdict

from refold.change import Change, refs_in
from refold.report.data import NodeLink


def regions(change: Change) -> list[tuple[frozenset[str], frozenset[str]]]:
    """(nodes before, nodes after) of each separate place that a change touched. A node that is only a reader of a
    place, and was adjusted to what it reads now, is not part of it."""
    named = {name for site in change.sites for name in site.nodes}
    rewired = {n for n, (a, b) in change.changed.items() if a.op == b.op and a.target == b.target}
    part = [n for n in change.changed if n in named or (not named and n not in rewired)]
    touched = {*change.created, *change.erased, *part}
    leader = {name: name for name in touched}

    def find(name: str) -> str:
        while leader[name] != name:
            leader[name] = leader[leader[name]]
            name = leader[name]
        return name

    records = [*change.created.items(), *change.erased.items()]
    records += [(n, r) for n, pair in change.changed.items() for r in pair]
    for name, record in records:
        linked = [ref[1:] for ref in refs_in(record) if ref[1:] in touched]
        group = ([name] if name in touched else []) + linked
        for other in group[1:]:
            leader[find(other)] = find(group[0])
    places: dict[str, set[str]] = defaultdict(set)
    for name in touched:
        places[find(name)].add(name)
    before = {*change.erased, *change.changed}
    after = {*change.created, *change.changed}
    return [(frozenset(place & before), frozenset(place & after)) for place in places.values()]


def trace_back(changes: list[tuple[int, Change]]) -> tuple[dict[str, tuple[str, ...]], tuple[NodeLink, ...]]:
    """Origins of each touched node of the final graph, and links between both graphs; changes come with their steps."""
    origins: dict[str, frozenset[str]] = {}
    steps: dict[str, frozenset[int]] = {}
    gone: dict[str, frozenset[int]] = {}
    for number, change in changes:
        for before, after in regions(change):
            source = frozenset().union(*(origins.get(name, frozenset({name})) for name in before))
            taken = frozenset({number}).union(*(steps.get(name, frozenset()) for name in before))
            for name in after:
                origins[name], steps[name] = source, taken
            if not after:
                gone |= dict.fromkeys(source, taken)
        for name in change.erased:
            origins.pop(name, None)
    groups: dict[frozenset[str], list[str]] = defaultdict(list)
    for name, source in origins.items():
        groups[source].append(name)
    links = [
        NodeLink(tuple(sorted(source)), tuple(names), tuple(sorted(frozenset().union(*(steps[n] for n in names)))))
        for source, names in groups.items()
    ]
    links += [NodeLink((name,), (), tuple(sorted(taken))) for name, taken in gone.items()]
    return {name: tuple(sorted(source)) for name, source in origins.items()}, tuple(links)
