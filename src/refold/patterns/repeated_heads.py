"""Keys and values whose heads were repeated before attention, as grouped-query attention is often written."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from refold.graph.arguments import argument
from refold.graph.targets import called_name
from refold.graph.values import example_value, rank_of, same_sizes, size_of
from refold.graph.view import GraphView
from refold.rewrite.operators import Attention
from refold.rewrite.refusal import Refuse, unchanged_between


def match_repeated(view: GraphView, call: Attention) -> int | None:
    """How many times the heads were repeated that attention reads; refuses it where it cannot read them unrepeated."""
    key, value = unrepeated(call.key), unrepeated(call.value)
    if call.enable_gqa is not False or key is None or value is None:
        return None
    heads, groups = size_of(call.query, -3), size_of(key[0], -3)
    fits = isinstance(heads, int) and isinstance(groups, int) and heads == groups * key[1]
    if key[1] != value[1] or not fits:
        raise Refuse("its heads are repeated in a way that is not grouped-query attention")
    if call.dropout_p != 0.0:
        raise Refuse("it drops attention weights at random, and another kernel would draw others")
    for at, (source, _) in ((call.key, key), (call.value, value)):
        unchanged_between(view, at, at, call.node)
        unchanged_between(view, source, at, call.node)
    return key[1]


def unrepeated(node: Node) -> tuple[Node, int] | None:
    """The keys or values before each head was repeated, and how many times; None where they were not."""
    if called_name(node) == "repeat_interleave" and len(node.args) >= 2 and isinstance(node.args[0], Node):
        times, dim = node.args[1], argument(node, 2, "dim")
        return (node.args[0], times) if isinstance(times, int) and dim in (1, -3) and rank_of(node) == 4 else None
    if called_name(node) not in ("reshape", "view", "flatten", "contiguous"):
        return None
    expanded = _behind_slices(argument(node, 0, "input"))
    if expanded is None or called_name(expanded) != "expand":
        return None
    unsqueezed = _behind_slices(argument(expanded, 0, "input"))
    if unsqueezed is None or called_name(unsqueezed) != "unsqueeze" or argument(unsqueezed, 1, "dim") not in (2, -3):
        return None
    source = _behind_slices(argument(unsqueezed, 0, "input"))
    return _repeated(source, expanded, node) if source is not None else None


def _behind_slices(node: Any) -> Node | None:
    """A node, or what it is a full slice of."""
    whole = (0, torch.iinfo(torch.int64).max)
    while isinstance(node, Node) and called_name(node) == "slice" and node.args[2:] == whole:
        node = node.args[0]
    return node if isinstance(node, Node) else None


def _repeated(source: Node, expanded: Node, result: Node) -> tuple[Node, int] | None:
    first, middle, last = example_value(source), example_value(expanded), example_value(result)
    if first is None or middle is None or last is None or (first.dim(), middle.dim(), last.dim()) != (4, 5, 4):
        return None
    batch, heads, length, width = first.shape
    times = middle.shape[2]
    if not isinstance(times, int) or not isinstance(heads, int):
        return None
    fits = same_sizes(middle.shape, (batch, heads, times, length, width))
    return (source, times) if fits and same_sizes(last.shape, (batch, heads * times, length, width)) else None
