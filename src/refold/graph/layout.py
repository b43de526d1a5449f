"""Which calls depend on how a value lies in memory, and how far a change of the layout reaches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from refold.graph.aliasing import aliases, follow, makes_fresh, memory_roots, written_by
from refold.graph.targets import called_name, only_holds, runs_unknown_code
from refold.graph.values import example_value, is_number, rank_of, same_sizes
from refold.graph.view import GraphView

aten = torch.ops.aten

VIEWS: dict[Any, Any] = {"view": "reshape", torch.Tensor.view: torch.Tensor.reshape}
VIEWS |= {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}
"""Calls that need a fitting memory layout, and the ones that do the same on any."""

_CONTIGUOUS = {"contiguous", "linear", "addmm", "layer_norm", "embedding", "arange", "full", "ones", "zeros"}
_CONTIGUOUS_MODULES = (nn.Linear, nn.LayerNorm, nn.Embedding)


def makes_contiguous(gm: GraphModule, node: Node) -> bool:
    """Whether a node's value is contiguous, however its inputs lie."""
    if any(isinstance(a, torch.memory_format) for a in (*node.args, *node.kwargs.values())):
        return False
    if node.op == "call_module":
        return type(gm.get_submodule(str(node.target))) in _CONTIGUOUS_MODULES
    return called_name(node) in _CONTIGUOUS


def same_layout(a: Node, b: Node) -> bool:
    """Whether capture recorded the same strides for two values."""
    one, other = example_value(a), example_value(b)
    return one is not None and other is not None and same_sizes(one.stride(), other.stride())


_TELL_LAYOUT = {
    "as_strided", "as_strided_", "view_as", "view_as_complex", "stride", "data_ptr", "storage", "untyped_storage",
    "storage_offset", "is_contiguous", "dim_order", "resize", "resize_", "resize_as_", "set_",
}  # fmt: skip


def tells_layout(node: Node) -> bool:
    """Whether what a call of torch gives depends on how its input lies in memory."""
    return called_name(node) in _TELL_LAYOUT or (called_name(node) == "view" and has_dtype(node))


def has_dtype(node: Node) -> bool:
    """Whether a call is given a dtype: a view by one reads the same bits as other numbers."""
    return any(isinstance(value, torch.dtype) for value in (*node.args, *node.kwargs.values()))


def make_reshape(node: Node) -> None:
    """Let a view be a reshape, which takes any layout. The two have other names for the sizes, so these have none."""
    node.target = VIEWS[node.target]
    node.args, node.kwargs = (*node.args, *node.kwargs.values()), {}


def hands_out(node: Node) -> bool:
    """Whether a node gives its inputs to the caller, or puts them into an object that is given to the caller."""
    return node.op == "output" or (node.op == "call_function" and only_holds(node.target))


def readers_behind(gm: GraphModule, node: Node) -> Iterator[Node]:
    """All that read a value, or something that may lie in memory as it does: most operators hand the layout of their
    input on."""
    return follow([node], lambda n: n.users if n is node or not makes_contiguous(gm, n) else ())


def layout_reader(gm: GraphModule, node: Node) -> Node | None:
    """A node that may depend on how a value lies, be it far behind. What leaves the graph counts too."""
    behind = readers_behind(gm, node)
    return next((reader for reader in behind if reader.op == "output" or needs_layout(gm, reader)), None)


def needs_layout(gm: GraphModule, node: Node) -> bool:
    """Whether a call works on some layouts alone, or tells what the layout is, or may."""
    return node.target in VIEWS or tells_layout(node) or runs_unknown_code(gm, node)


# --- how far a change of the layout reaches ----------------------------------------------------------------------


def changed_layouts(view: GraphView, makers: Iterable[Node], readers: set[Node]) -> set[Node]:
    """Every value that may lie in memory otherwise than before, where some nodes make another layout and some are
    given one."""
    found = set(makers)
    for node in view.nodes:
        if (node in readers or not found.isdisjoint(node.all_input_nodes)) and _hands_layout_on(view, node):
            found.add(node)
    return found


def _hands_layout_on(view: GraphView, node: Node) -> bool:
    computes = node.op in ("call_module", "call_function", "call_method") and not runs_unknown_code(view.gm, node)
    return computes and not is_number(node) and not makes_contiguous(view.gm, node)


def takes_any_layout(view: GraphView, node: Node) -> bool:
    """Whether a call of torch makes a tensor of its own, the same one however its input lies in memory."""
    known = makes_fresh(view.gm, node) and not runs_unknown_code(view.gm, node)
    return known and not tells_layout(node) and not is_number(node)


def layout_exits(view: GraphView, changed: set[Node]) -> Iterator[tuple[Node, Node, int]]:
    """(value, reader, region) where a changed layout leaves the graph or is read by unknown code. Readers of one region
    can share a copy: nothing is written between them."""
    for node in view.nodes:
        if node.op != "output" and not runs_unknown_code(view.gm, node):
            continue
        region = view.region(node)[0]
        yield from ((v, node, region) for v in node.all_input_nodes if v in changed and is_one_tensor(view, v))


_GIVE_SEVERAL = (nn.RNNBase, nn.LSTMCell, nn.MultiheadAttention)


def is_one_tensor(view: GraphView, node: Node) -> bool:
    """Whether a value is one tensor of at least two dimensions: as recorded, or as a module of torch makes it."""
    rank = rank_of(node)
    if rank is not None or node.op != "call_module":
        return rank is not None and rank > 1
    module = view.module(str(node.target))
    return not isinstance(module, _GIVE_SEVERAL) and not getattr(module, "return_indices", False)


_COPY_BY_LAYOUT = {"view", "_unsafe_view", "reshape", "reshape_as", "flatten", "ravel", "contiguous", "to"}


def _copies_by_layout(view: GraphView, node: Node) -> bool:
    """Whether a call gives a view or a copy, depending on how its input lies."""
    if node.op == "call_module":
        return isinstance(view.module(str(node.target)), nn.Flatten)
    return called_name(node) in _COPY_BY_LAYOUT


def splitting_write(view: GraphView, changed: set[Node], node: Node) -> Node | None:
    """A write into memory that a value and its source share in one layout and not in the other: through the value and
    read in the source later, or the other way round. Unknown code reads a copy and may write into it, or return it."""
    start = view.position[node]
    writers = [view.nodes[i] for i in view.writers if i >= start]
    if not writers or not (runs_unknown_code(view.gm, node) or _copies_by_layout(view, node)):
        return None
    mine = {node, *(value for value, _ in aliases(view.gm, node))}
    roots = memory_roots(view.gm, *(v for v in node.all_input_nodes if v in changed))
    source = roots.union(value for root in roots for value, _ in aliases(view.gm, root)) - mine
    for writer in writers:
        written = set(written_by(view.gm, writer))
        through_value = writer is node or not written.isdisjoint(mine)
        through_source = writer is not node and not written.isdisjoint(source)
        watched = (source if through_value else set()) | (mine if through_source else set())
        if any(_is_read_after(view, value, writer) for value in watched):
            return writer
    return None


def _is_read_after(view: GraphView, value: Node, writer: Node) -> bool:
    start = view.position[writer]
    return value.op in ("placeholder", "get_attr") or any(view.position[user] > start for user in value.users)
