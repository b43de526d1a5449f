"""Calls that choose some places along one dimension of a value, and the same choice made of another value."""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from refold.graph.targets import name_of
from refold.patterns.dimensions.sized_calls import recorded_sizes
from refold.rewrite.editor import Editor

aten = torch.ops.aten


@dataclass(frozen=True)
class Selection:
    """Places along a dimension: from `start` to `stop` (None: the end), or those that the numbers of a node name."""

    dim: int
    start: int = 0
    stop: int | None = None
    index: Node | None = None
    wraps: bool = True
    """Whether numbers below 0 count from the end; else they raise."""

    def of(self, value: Node, dim: int, edit: Editor, before: Node) -> Node:
        """The same places of another value, along one of its dimensions, which stays."""
        if self.index is not None:
            if self.wraps:
                return edit.call(before, aten.index.Tensor, value, [*[None] * dim, self.index])
            return edit.call(before, aten.index_select.default, value, dim, self.index)
        stop = sys.maxsize if self.stop is None else self.stop
        return edit.call(before, aten.slice.Tensor, value, dim, self.start, stop)

    def is_last(self) -> bool:
        """Whether it is the last place alone."""
        return self.index is None and (self.start, self.stop) == (-1, None)


def selection_of(node: Node) -> Selection | None:
    """What a node chooses of its input, if it chooses few places whose number is fixed; None for all other nodes."""
    source = node.args[0] if node.args else None
    if node.op != "call_function" or node.kwargs or not isinstance(source, Node):
        return None
    sizes, own = recorded_sizes(source), recorded_sizes(node)
    found = _parsed(node, len(sizes)) if sizes is not None and own is not None else None
    if found is None or sizes is None or own is None:
        return None
    count = own[found.dim] if len(own) == len(sizes) else 1
    length = sizes[found.dim]
    few = isinstance(count, int) and (not isinstance(length, int) or 2 * count <= length)
    return found if few else None


def drops_dimension(node: Node) -> bool:
    """Whether a selection gives one place without its dimension."""
    return name_of(node) == "select" or (node.target is operator.getitem and not _has_slice_only(node.args[1]))


def _has_slice_only(where: Any) -> bool:
    return isinstance(where, tuple) and all(isinstance(part, slice) for part in where)


def _parsed(node: Node, rank: int) -> Selection | None:
    name, args = name_of(node), node.args
    if name == "select":
        return _between(rank, args[1], args[2], None, one=True)
    if name == "slice":
        given: tuple[Any, ...] = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])
        return _between(rank, *given[:3]) if given[3] == 1 else None
    if name == "index_select" and isinstance(args[1], int) and isinstance(args[2], Node):
        return _named(rank, args[1], args[2], wraps=False)
    if name == "index" and isinstance(args[1], list | tuple):
        places = [i for i, part in enumerate(args[1]) if part is not None]
        index = args[1][places[0]] if len(places) == 1 else None
        return _named(rank, places[0], index) if isinstance(index, Node) else None
    if node.target is operator.getitem and isinstance(args[1], tuple):
        return _by_getitem(rank, args[1])
    return None


def _by_getitem(rank: int, where: tuple[Any, ...]) -> Selection | None:
    chosen = [i for i, part in enumerate(where) if part != slice(None)]
    part = where[chosen[0]] if len(chosen) == 1 else None
    if isinstance(part, slice) and part.step in (None, 1):
        return _between(rank, chosen[0], part.start, part.stop)
    return _between(rank, chosen[0], part, None, one=True) if isinstance(part, int) else None


def _between(rank: int, dim: Any, start: Any, stop: Any, *, one: bool = False) -> Selection | None:
    start = 0 if start is None else start
    if not isinstance(dim, int) or not isinstance(start, int) or isinstance(start, bool):
        return None
    if one:
        stop = None if start == -1 else start + 1
    elif stop is not None and not isinstance(stop, int):
        return None
    return Selection(dim % rank, start, None if stop is None or stop >= sys.maxsize else stop)


def _named(rank: int, dim: int, index: Node, *, wraps: bool = True) -> Selection | None:
    value = index.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.dtype not in (torch.int64, torch.int32):
        return None
    return Selection(dim % rank, index=index, wraps=wraps)
