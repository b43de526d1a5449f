"""Values that lack the first or last positions of a grid: `logits[:, :-1]`, which are compared with the next words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from refold.graph.targets import name_of

_TO_THE_END = 2**62


@dataclass(frozen=True)
class Window:
    """How many positions of the grid are missing in front, and how many behind."""

    front: int = 0
    behind: int = 0

    @property
    def missing(self) -> int:
        """How many positions are missing."""
        return self.front + self.behind


WHOLE = Window()


def cut(node: Node, positions: int | None, window: Window) -> Window | None:
    """What is left of a window where a node cuts a few of the positions off, which lie along that dimension of its
    operand; None for any other node."""
    args: Any = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :]) if node.args else ()
    if node.op != "call_function" or name_of(node) != "slice" or node.kwargs or len(args) != 5:
        return None
    _given, dim, start, end, step = args
    start, end = start or 0, _TO_THE_END if end is None else end
    if positions is None or dim != positions or step != 1 or not (isinstance(start, int) and isinstance(end, int)):
        return None
    if start < 0 or 0 <= end < _TO_THE_END:
        return None
    return Window(window.front + start, window.behind + (-end if end < 0 else 0))
