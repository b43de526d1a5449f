"""A call with the sizes that capture recorded, the words for what a dimension follows, and what is proven of sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import Node

from refold.graph.values import proves_shapes, same_size
from refold.graph.view import GraphView
from refold.patterns.rule_table import RuleTable

MIXES: Literal["mixes"] = "mixes"
Dims = tuple[int | Literal["mixes"] | None, ...]
"""For each dimension of a value: the dimension of an input that it follows, None where it does not vary with it, or
MIXES."""
Followed = dict[Node, Dims]
Sizes = tuple[Any, ...]


class NotUnderstood(Exception):
    """Raised where nothing is known about a call."""


@dataclass(frozen=True)
class SizedCall:
    """A call whose value is a tensor, or several tensors of one rank; `sizes` are those of the (first) value."""

    view: GraphView
    node: Node
    sizes: Sizes

    @property
    def rank(self) -> int:
        """The number of dimensions of its value."""
        return len(self.sizes)

    def sizes_of(self, value: Any) -> Sizes:
        """The sizes of an operand that must be a tensor."""
        found = recorded_sizes(value) if isinstance(value, Node) else None
        if found is None:
            raise NotUnderstood
        return found

    def follows(self, *operands: Any, dims: Dims) -> Followed:
        """What is said of the operands that are tensors."""
        return join([{n: dims} for n in operands if isinstance(n, Node) and recorded_sizes(n) is not None])

    def broadcast(self, operand: Any, sizes: Sizes | None = None) -> Dims:
        """What a result of these sizes follows where an operand is broadcast to them."""
        given, sizes = self.sizes_of(operand), self.sizes if sizes is None else sizes
        new = len(sizes) - len(given)
        if new < 0:
            raise NotUnderstood
        return (None,) * new + tuple(_stretched(given[d], sizes[new + d], d) for d in range(len(given)))

    def kept(self, operand: Any, dims: Sequence[Any]) -> Dims:
        """These dimensions of an operand, in the places of the result's; those whose size changes mix."""
        given = self.sizes_of(operand)
        if len(dims) != self.rank:
            raise NotUnderstood
        sizes = zip(dims, self.sizes, strict=True)
        return tuple(d if not isinstance(d, int) or surely_equal(given[d], size) else MIXES for d, size in sizes)


def _stretched(given: Any, size: Any, dim: int) -> int | Literal["mixes"] | None:
    if surely_equal(given, size):
        return dim
    if surely_equal(given, 1):
        return None
    return dim if surely(given != 1) else MIXES  # torch takes no other sizes than the result's


RULES: RuleTable[Callable[[SizedCall], Followed]] = RuleTable()
"""What the value of each operator follows."""


def join(parts: Sequence[Followed]) -> Followed:
    """What several operands say together: a tensor that is given twice is read as both say, or is mixed."""
    found: Followed = {}
    for node, dims in (item for part in parts for item in part.items()):
        before = found.setdefault(node, dims)
        found[node] = tuple(a if a == b else MIXES for a, b in zip(before, dims, strict=True))
    return found


def recorded_sizes(node: Node) -> Sizes | None:
    """The sizes that capture proved for a node's value, or for each of several values of one rank."""
    value = node.meta.get("val")
    many = list(value) if isinstance(value, tuple | list) else [value]
    tensors = [v for v in many if isinstance(v, torch.Tensor) and proves_shapes(v)]
    if not tensors or len(tensors) < len(many) or len({v.dim() for v in tensors}) > 1:
        return None
    return tuple(tensors[0].shape)


def surely(condition: Any) -> bool:
    """Whether a condition over recorded sizes holds in every run that passes the conditions of capture."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # symbolic algebra takes long to load

    return isinstance(condition, bool | torch.SymBool) and statically_known_true(condition)


def surely_equal(a: Any, b: Any) -> bool:
    """Whether two recorded sizes are equal in every run."""
    return same_size(a, b) or surely(a == b)


def regrouped(old: Sizes, new: Sizes) -> list[tuple[list[int], list[int]]]:
    """How a reshape regroups dimensions: groups of old and new ones, as small as can be proven, each pair with equally
    many elements in the same order."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        ends = [(a, b) for a in range(i, len(old) + 1) for b in range(j, len(new) + 1) if (a, b) != (i, j)]
        ends.sort(key=sum)
        found = next((e for e in ends if surely_equal(_product(old[i : e[0]]), _product(new[j : e[1]]))), None)
        i2, j2 = found or (len(old), len(new))
        groups.append((list(range(i, i2)), list(range(j, j2))))
        i, j = i2, j2
    return groups


def _product(sizes: Sizes) -> Any:
    found: Any = 1
    for size in sizes:
        found = found * size
    return found
