"""Which operands of an operator are indices, and how many places there are for them."""

from __future__ import annotations

import torch
from torch.fx import Node

from refold.executors.value_ranges import bare_name
from refold.graph.arguments import argument

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_ALONG_A_DIM = (
    *("gather", "index_select", "index_add", "index_copy", "index_fill", "scatter", "scatter_add", "scatter_reduce"),
    "index_reduce",
)
_UNBOUNDED = (
    *("embedding_bag", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d", "max_unpool2d", "max_unpool3d", "put"),
    *("masked_scatter", "bincount", "nll_loss", "nll_loss_nd", "cross_entropy_loss", "ctc_loss", "bucketize"),
    *("_embedding_bag", "segment_reduce", "as_strided", "bitwise_left_shift", "bitwise_right_shift", "__lshift__"),
    *("__rshift__", "repeat_interleave", "nll_loss2d"),
)
"""Operators that read where their operands say, in ways that are not bounded here."""


def index_limits(node: Node) -> dict[Node, int]:
    """The operands of a node that are indices, each with the number of places."""
    name = bare_name(node)
    if name == "embedding":
        return _limits([node.args[1]], [int(_shape(node.args[0])[0])])
    if name in _ALONG_A_DIM:
        shape = _shape(node.args[0])
        dim = argument(node, 1, "dim")
        return _limits([argument(node, 2, "index")], [int(shape[dim]) if shape else 1])
    if name in ("index", "_unsafe_index", "index_put", "_unsafe_index_put", "_index_put_impl"):
        listed = argument(node, 1, "indices")
        return _limits(listed, list(_shape(node.args[0])))
    if name == "take":
        return _limits([node.args[1]], [int(node.args[0].meta["val"].numel())])  # type: ignore[union-attr]
    if name == "one_hot":
        classes = argument(node, 1, "num_classes", -1)
        return _limits([node.args[0]], [classes if isinstance(classes, int) and classes > 0 else 0])
    return {}


def reads_anywhere(node: Node) -> bool:
    """Whether a node reads memory where its operands say, and nothing here can bound that."""
    if bare_name(node) in _UNBOUNDED:
        return True
    # an element or a part that is chosen by what is computed from values
    chosen = bare_name(node) in ("select", "narrow", "slice", "roll", "unfold", "select_scatter", "slice_scatter")
    return chosen and any(isinstance(n.meta.get("val"), torch.SymInt) for n in node.all_input_nodes)


def _limits(indices: object, sizes: list[int]) -> dict[Node, int]:
    found: dict[Node, int] = {}
    for index, size in zip(indices if isinstance(indices, list | tuple) else [], sizes, strict=False):
        if isinstance(index, Node) and index.meta["val"].dtype in _WHOLE:
            found[index] = min(size, found.get(index, size))
    return found


def _shape(value: object) -> torch.Size:
    return value.meta["val"].shape  # type: ignore[attr-defined]
