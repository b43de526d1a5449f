"""Layers of one kind that read the same input, grouped so that each group can become one layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.fx import Node

from refold.graph.aliasing import writes_to
from refold.graph.view import Call, GraphView
from refold.rewrite.refusal import Refuse, attempt, movable, own, sliceable
from refold.rewrite.rule import Site, Skip


def parallel_layers(
    view: GraphView,
    match: Callable[[GraphView, Node], Call | None],
    traits: Callable[[GraphView, Call], tuple[Any, ...]],
    kind: str,
    differ_in: str,
) -> Iterator[Site | Skip]:
    """A site for all layers on one input that have the same traits, with their calls as its detail; a refusal for the
    others. `traits` may refuse a layer; `kind` and `differ_in` are words for the sentences."""
    found: dict[tuple[Node, int], list[Call]] = {}
    for node in view.nodes:
        call = attempt(match, view, node)
        if isinstance(call, Refuse):
            yield Skip(node, call.reason)
        elif call is not None:
            found.setdefault((call.input, view.region(node)[1]), []).append(call)
    for calls in found.values():
        if len(calls) == 1:
            yield Skip(calls[0].node, f"no other {kind} reads the same input")
        else:
            yield from _sites(view, calls, traits, differ_in)


def _sites(
    view: GraphView, calls: list[Call], traits: Callable[[GraphView, Call], tuple[Any, ...]], differ_in: str
) -> Iterator[Site | Skip]:
    alike: dict[tuple[Any, ...], list[Call]] = {}
    for call in calls:
        key = attempt(_checked, view, call, traits)
        if isinstance(key, Refuse):
            yield Skip(call.node, key.reason)
        else:
            alike.setdefault(key, []).append(call)
    for group in alike.values():
        for part in _parts(view, group):
            if isinstance(part, Skip):
                yield part
            elif len(part) > 1:
                names = ", ".join(call.name for call in part)
                yield Site(tuple(call.node for call in part), f"merged {names}", part)
            elif len(group) == 1:
                yield Skip(part[0].node, f"the others on its input differ in {differ_in}")


def _checked(view: GraphView, call: Call, traits: Callable[[GraphView, Call], tuple[Any, ...]]) -> tuple[Any, ...]:
    key = traits(view, call)
    own(view, call)
    movable(view, call)
    sliceable(view, call.node)
    return key


def _parts(view: GraphView, group: list[Call]) -> Iterator[list[Call] | Skip]:
    """Cut a group where the input is written to between two layers."""
    part = [group[0]]
    for call in group[1:]:
        writer = writes_to(view.gm, call.input, view.writers_between(part[-1].node, call.node))
        if writer is None:
            part.append(call)
            continue
        yield Skip(call.node, f"{writer.name} writes into its input between it and {part[-1].node.name}")
        yield part
        part = [call]
    yield part


def merged_path(names: Iterable[str]) -> str:
    """`a.b.q`, `a.b.k` -> `a.b.q_k_merged`: under the deepest path they share, named after their own names."""
    split = [name.split(".") for name in names]
    shared = 0
    while all(len(parts) > shared + 1 and parts[shared] == split[0][shared] for parts in split):
        shared += 1
    own_names = "_".join("_".join(parts[shared:]) for parts in split[:4])
    more = f"_and_{len(split) - 4}_more" if len(split) > 4 else ""
    return ".".join([*split[0][:shared], f"{own_names}{more}_merged"])
