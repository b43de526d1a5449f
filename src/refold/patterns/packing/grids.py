"""The grid of a padded batch: the mask that says which places are real, and where it lies in a graph's values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from refold.graph.targets import name_of
from refold.graph.values import example_value
from refold.graph.view import GraphView
from refold.patterns.dimensions.sized_calls import recorded_sizes, surely_equal
from refold.patterns.packing.token_operators import OPERATORS
from refold.patterns.packing.windows import WHOLE, Window
from refold.rewrite.operators import LINEAR

Place = tuple[int | None, int | None]
"""The dimensions of a value along which the grid's rows and its positions lie; the same one twice where they are one
dimension, (None, None) where the value has neither."""


@dataclass(frozen=True)
class Grid:
    """Rows and positions of one mask, and the input that has them too, whose sizes are counted."""

    view: GraphView
    mask: Node
    source: Node
    windows: dict[Node, Window] = field(default_factory=dict, repr=False)
    """Of the values that lack some positions."""
    _labels: dict[tuple[str, int], str] = field(default_factory=dict, repr=False)

    @property
    def rows(self) -> Any:
        """The recorded number of rows."""
        return _sizes(self.source)[0]

    @property
    def length(self) -> Any:
        """The recorded number of positions."""
        return _sizes(self.source)[1]

    def window(self, node: Node) -> Window:
        """Which of the grid's positions a value has, if it has any."""
        return self.windows.get(node, WHOLE)

    def label(self, size: Any, missing: int = 0) -> str:
        """What a recorded size counts: 'rows', 'length', 'places' (all of the grid), or '' for anything else, where so
        many positions are missing. The mask has the rows and positions of the other input: calls in which it has not
        are not packed."""
        key = str(size), missing
        if isinstance(size, int):
            return ""
        if key not in self._labels:
            length = self.length - missing
            counts = {"rows": self.rows, "length": length, "places": self.rows * length}
            unified = self.unified(size)
            equal = (name for name, n in counts.items() if unified == n.node.expr or surely_equal(size, n))
            self._labels[key] = next(equal, "")
        return self._labels[key]

    def unified(self, size: Any) -> Any:
        """The expression of a size, with the sizes of the other input in the place of those of the mask."""
        same = self.mask_sizes
        return size.node.expr.subs({a.node.expr: b.node.expr for a, b in same if isinstance(a, torch.SymInt)})

    @property
    def mask_sizes(self) -> list[tuple[Any, Any]]:
        """The sizes of the mask, with what they are in calls that are packed."""
        given = _sizes(self.mask)
        keys = given[-1:] if len(given) == 2 else given[-2:]
        return [(given[0], self.rows), *((size, self.length) for size in keys)]

    def place(self, node: Node, window: Window | None = None) -> Place | None:
        """Where the grid, or a window of it, lies in a value; None where that is not clear, or no sizes are
        recorded."""
        sizes, missing = recorded_sizes(node), (window or self.window(node)).missing
        if sizes is None:
            return None
        labels = [self.label(size, missing) for size in sizes]
        rows, positions, places = ([d for d, x in enumerate(labels) if x == name] for name in _LABELS)
        if max(len(rows), len(positions), len(places)) > 1 or (places and (rows or positions)):
            return None
        if places:
            return places[0], places[0]
        return (rows[0] if rows else None), (positions[0] if positions else None)


_LABELS = ("rows", "length", "places")


def _sizes(node: Node) -> Any:
    recorded = example_value(node)
    assert recorded is not None
    return recorded.shape


def find_grids(view: GraphView) -> Iterator[Grid]:
    """Every input that may be a padding mask, with another input of the same rows and positions. What is looked up in a
    table are ids, not a mask; whether it is one indeed is for others to prove."""
    inputs = [n for n in view.nodes if n.op == "placeholder" and recorded_sizes(n) is not None and n.users]
    ids = [n for n in inputs if _is_looked_up(n) and _is_open(n)]
    for mask in inputs:
        sizes = recorded_sizes(mask) or ()
        if len(sizes) < 2 or _is_looked_up(mask) or not isinstance(sizes[-1], torch.SymInt):
            continue
        others = [n for n in (*ids, *inputs) if n is not mask and _is_open(n)]
        same = [n for n in others if surely_equal((recorded_sizes(n) or ())[1], sizes[-1])]
        if same or (ids and isinstance(sizes[0], torch.SymInt)):
            yield Grid(view, mask, (same or ids)[0])


def _is_open(node: Node) -> bool:
    """Whether a value has rows and positions, and their numbers are open."""
    sizes = recorded_sizes(node) or ()
    if len(sizes) not in (2, 3) or not all(isinstance(size, torch.SymInt) for size in sizes[:2]):
        return False
    return all(size.node.expr.is_Symbol for size in sizes[:2]) and not surely_equal(sizes[0], sizes[1])


HANDS_ON = {
    "view", "reshape", "to", "contiguous", "clone", "alias", "slice", "unsqueeze", "squeeze", "long", "int",
    "transpose", "permute", "t", "flatten", "expand",
}  # fmt: skip
"""What gives the elements of its input back in another shape."""


def _is_looked_up(node: Node) -> bool:
    """Whether a value is looked up in a table (be it packed before), or given to a layer."""
    for user in node.users:
        if user.op == "call_module" or name_of(user) == "embedding" or user.target is OPERATORS.pack_tokens.default:
            return True
        if name_of(user) in HANDS_ON and user.args[:1] == (node,) and _is_looked_up(user):
            return True
    return False


def is_product(view: GraphView, node: Node) -> bool:
    """Whether a node multiplies by a matrix: the work that packing saves."""
    if node.op == "call_module":
        kinds = (*LINEAR.modules, torch.nn.Conv1d)
        return isinstance(view.module(str(node.target)), kinds)
    return name_of(node) in _PRODUCTS


_PRODUCTS = {"linear", "addmm", "mm", "bmm", "matmul", "einsum", "conv1d", "baddbmm", "scaled_dot_product_attention"}
