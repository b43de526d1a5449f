"""A stable fingerprint of a graph: the same in every process, different for any other computation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from refold.expected import by_position
from refold.fingerprint import fingerprint
from refold.snapshot import NodeRecord, Ref, function_name, record_node


def node_digests(gm: GraphModule, *, names: bool = True) -> list[str]:
    """A short digest of every node, in order; without names, nodes are known by their places."""
    records: Sequence[NodeRecord] = [record_node(node) for node in gm.graph.nodes]
    return [_digest(record) for record in (records if names else by_position(records))]


def node_names(gm: GraphModule) -> list[str]:
    """The names of a graph's nodes, in order."""
    return [node.name for node in gm.graph.nodes]


def _digest(record: NodeRecord) -> str:
    target = record.target if isinstance(record.target, str) else function_name(record.target)
    words = "|".join((record.name, record.op, target, spell_value(record.args), spell_value(record.kwargs)))
    return hashlib.sha256(words.encode()).hexdigest()[:24]


def spell_value(value: Any) -> str:
    """An argument as text: equal for equal values, without addresses."""
    if isinstance(value, Ref):
        return f"%{value.name}"
    if isinstance(value, tuple | list):
        return f"[{','.join(map(spell_value, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{k!r}:{spell_value(v)}' for k, v in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({spell_value((value.start, value.stop, value.step))})"
    if isinstance(value, torch.Tensor):
        return fingerprint(value)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, type) or callable(value):
        return function_name(value)
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format) or value is Ellipsis:
        return str(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def first_difference(expected: Sequence[str], found: Sequence[str], names: Sequence[str]) -> str:
    """A sentence about where two lists of digests part; `names` are those of the found nodes."""
    for place, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return f"they part at node {place} ({names[place]})"
    return f"{len(expected)} nodes were saved and {len(found)} were found"
