"""Who looks at how a value lies in memory: what a rewrite asks before it gives readers the same numbers laid out
otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from refold.attention import same_sizes
from refold.known_code import is_known_function, is_known_module, only_holds
from refold.match import example_value
from refold.purity import name_of

aten = torch.ops.aten

VIEWS: dict[Any, Any] = {"view": "reshape", torch.Tensor.view: torch.Tensor.reshape}
VIEWS |= {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}
"""Calls that need a fitting memory layout, and the ones that do the same on any."""
NEED_LAYOUT: set[Any] = {
    "as_strided",
    "view_as",
    "stride",
    "data_ptr",
    "untyped_storage",
    "storage_offset",
    "is_contiguous",
}
NEED_LAYOUT |= {torch.as_strided, aten.as_strided.default, torch.view_as_complex, aten.view_as_complex.default}
NEED_LAYOUT |= {aten.view.dtype, torch.Tensor.as_strided, torch.Tensor.view_as}

_CONTIGUOUS = {"contiguous", "linear", "addmm", "layer_norm", "embedding", "arange", "full", "ones", "zeros"}
_CONTIGUOUS_MODULES = (nn.Linear, nn.LayerNorm, nn.Embedding)


def makes_contiguous(gm: GraphModule, node: Node) -> bool:
    """Whether a node's value is contiguous, however its inputs lie."""
    if any(isinstance(a, torch.memory_format) for a in (*node.args, *node.kwargs.values())):
        return False
    if node.op == "call_module":
        return type(gm.get_submodule(str(node.target))) in _CONTIGUOUS_MODULES
    return node.op in ("call_function", "call_method") and name_of(node) in _CONTIGUOUS


def same_layout(a: Node, b: Node) -> bool:
    """Whether capture noted the same strides for two values."""
    one, other = example_value(a), example_value(b)
    return one is not None and other is not None and same_sizes(one.stride(), other.stride())


_TELL_LAYOUT = {
    "as_strided", "as_strided_", "view_as", "view_as_complex", "stride", "data_ptr", "storage", "untyped_storage",
    "storage_offset", "is_contiguous", "dim_order", "resize", "resize_", "resize_as_", "set_",
}  # fmt: skip


def tells_layout(node: Node) -> bool:
    """Whether what a call of torch gives depends on how its input lies in memory."""
    if node.op not in ("call_function", "call_method"):
        return False
    as_other_dtype = node.target in VIEWS and has_dtype(node)
    return as_other_dtype or node.target in NEED_LAYOUT or name_of(node) in _TELL_LAYOUT


def has_dtype(node: Node) -> bool:
    """Whether a call is given a dtype: a view by one reads the same bits as other numbers."""
    return any(isinstance(value, torch.dtype) for value in (*node.args, *node.kwargs.values()))


def make_reshape(node: Node) -> None:
    """Let a view be a reshape, which takes any layout. The two have other names for the sizes, so these have none."""
    node.target = VIEWS[node.target]
    node.args, node.kwargs = (*node.args, *node.kwargs.values()), {}


def is_foreign(gm: GraphModule, node: Node) -> bool:
    """Whether a node runs code that is not torch's: it may view its input, or trust that it is contiguous."""
    if node.op == "call_module":
        return not is_known_module(gm.get_submodule(str(node.target)))
    return node.op == "call_function" and not is_known_function(node.target)


def hands_out(node: Node) -> bool:
    """Whether a node gives its inputs to the caller, or puts them into an object that is given to the caller."""
    return node.op == "output" or (node.op == "call_function" and only_holds(node.target))


def readers_behind(gm: GraphModule, node: Node) -> Iterator[Node]:
    """All that read a value, or something that may lie in memory as it does: most operators hand the layout of their
    input on."""
    pending, seen = [node], {node}
    while pending:
        for reader in pending.pop().users:
            if reader in seen:
                continue
            seen.add(reader)
            yield reader
            if not makes_contiguous(gm, reader):
                pending.append(reader)


def layout_reader(gm: GraphModule, node: Node) -> Node | None:
    """A node that may depend on how a value lies, be it far behind. What leaves the graph counts too."""
    for reader in readers_behind(gm, node):
        if reader.op == "output" or needs_layout(gm, reader):
            return reader
    return None


def needs_layout(gm: GraphModule, node: Node) -> bool:
    """Whether a call works on some layouts alone, or tells what the layout is, or may."""
    return node.target in VIEWS or node.target in NEED_LAYOUT or is_foreign(gm, node)
