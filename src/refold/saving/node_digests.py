"""Digests of a graph's nodes: the same in every process, different for any other computation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from refold.fingerprint import fingerprint
from refold.record.nodes import NodeRecord, Ref, function_name, record_node
from refold.record.outside_edits import by_position


def node_digests(gm: GraphModule) -> list[str]:
    """A short digest of every node, in order. Nodes are known by their positions, so their names do not matter."""
    return [_digest(record) for record in by_position([record_node(node) for node in gm.graph.nodes])]


def node_names(gm: GraphModule) -> list[str]:
    """The names of a graph's nodes, in order."""
    return [node.name for node in gm.graph.nodes]


def difference_from(expected: Sequence[str], gm: GraphModule) -> str | None:
    """Where a graph parts from the one that has these digests, as half a sentence; None if it is the same one."""
    found = node_digests(gm)
    for index, (a, b, name) in enumerate(zip(expected, found, node_names(gm), strict=False)):
        if a != b:
            return f"they part at node {index} ({name})"
    return None if len(expected) == len(found) else f"{len(expected)} nodes were saved and {len(found)} were found"


def _digest(record: NodeRecord) -> str:
    target = record.target if isinstance(record.target, str) else function_name(record.target)
    words = "|".join((record.name, record.op, target, canonical_text(record.args), canonical_text(record.kwargs)))
    return hashlib.sha256(words.encode()).hexdigest()[:24]


def canonical_text(value: Any) -> str:
    """An argument as text: equal for equal values, without addresses."""
    if isinstance(value, Ref):
        return f"%{value.name}"
    if isinstance(value, tuple | list):
        return f"[{','.join(map(canonical_text, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{k!r}:{canonical_text(v)}' for k, v in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({canonical_text((value.start, value.stop, value.step))})"
    if isinstance(value, torch.Tensor):
        return fingerprint(value)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, type) or callable(value):
        return function_name(value)
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format) or value is Ellipsis:
        return str(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"
