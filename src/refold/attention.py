"""One view of `scaled_dot_product_attention`, called as a function or as an ATen operator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from refold.aliasing import writes_to
from refold.match import GraphView, bind, example_value

aten = torch.ops.aten

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
DEFAULTS: dict[str, Any] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
ATTENTION: set[Any] = {F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default}


@dataclass(frozen=True)
class Attention:
    """A call of scaled dot-product attention with all of its arguments."""

    node: Node
    query: Node
    key: Node
    value: Node
    attn_mask: Any = None
    dropout_p: Any = 0.0
    is_causal: Any = False
    scale: Any = None
    enable_gqa: Any = False

    def write(self, **changes: Any) -> Attention:
        """Let the node be called with other arguments; what has its default is left out."""
        new = replace(self, **changes)
        self.node.args = (new.query, new.key, new.value)
        self.node.kwargs = {k: getattr(new, k) for k, default in DEFAULTS.items() if getattr(new, k) != default}
        return new


def match_attention(node: Node) -> Attention | str | None:
    """The attention that a node computes, a sentence where its arguments are not understood, or None."""
    if node.op != "call_function" or node.target not in ATTENTION:
        return None
    given = bind(node, NAMES)
    if given is None or not all(isinstance(given.get(name), Node) for name in NAMES[:3]):
        return "its arguments are not understood"
    return Attention(node, **given)


def why_not_read_later(view: GraphView, value: Node, at: Node, later: Node) -> str | None:
    """Why a value that is read at one node must not be read at a later one instead, as a sentence."""
    writer = writes_to(view.gm, value, view.writers_between(at, later))
    if writer is not None:
        return f"{writer.name} writes into {value.name} before {later.name}"
    switch = next(iter(view.mode_switches_between(at, later)), None)
    return None if switch is None else f"{switch.name} switches modes before {later.name}"


def same_size(a: Any, b: Any) -> bool:
    """Whether two noted sizes are surely equal: the same number, or the same symbolic expression."""
    return str(a) == str(b)


def same_sizes(a: Any, b: Any) -> bool:
    """Whether two noted shapes are surely equal."""
    return len(a) == len(b) and all(map(same_size, a, b))


def size_of(node: Node, dim: int) -> Any:
    """A noted size of a node's value; None where it was not noted."""
    noted = example_value(node)
    return noted.shape[dim] if noted is not None and -noted.dim() <= dim < noted.dim() else None
