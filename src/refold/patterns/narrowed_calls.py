"""A call that computes only some places of its value, from the same places of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from refold.graph.arguments import argument
from refold.graph.purity import is_pure
from refold.graph.targets import name_of
from refold.graph.values import example_value
from refold.graph.view import GraphView
from refold.patterns.dimensions.following import MIXES, followed_dims
from refold.patterns.dimensions.sized_calls import recorded_sizes, surely_equal
from refold.patterns.selections import Selection
from refold.rewrite.editor import Editor
from refold.rewrite.operators import match_attention
from refold.rewrite.refusal import Refuse

aten = torch.ops.aten
_RESHAPES = {"view", "reshape", "_unsafe_view"}
_SIZED = _RESHAPES | {"expand", "broadcast_to"}
"""Calls that are given the sizes of their value."""
_SHAPED_BY_OTHERS = {"expand_as", "view_as", "reshape_as"}
_WEIGHTED = {"linear", "addmm", "baddbmm", "embedding", "matmul", "mm", "bmm", "layer_norm", "rms_norm", "einsum"}


def inputs_to_narrow(view: GraphView, node: Node, dim: int) -> dict[Node, int]:
    """The inputs of which a call needs only the places that are wanted along a dimension of its value, each with its
    own dimension of these. Refuses where others are needed too."""
    if not is_pure(view.gm, node):
        raise Refuse("it does more than compute its value")
    followed, name = followed_dims(view, node), name_of(node)
    if followed is None or name in _SHAPED_BY_OTHERS:
        raise Refuse("what it reads for each place of its value is not known")
    mixed = next((given.name for given, dims in followed.items() if dims[dim] == MIXES), None)
    if mixed is not None:
        raise Refuse(f"each place of its value depends on more than one of {mixed}")
    found = {given: k for given, dims in followed.items() if isinstance(k := dims[dim], int)}
    if any(example_value(given) is None for given in found):
        raise Refuse("it is one of several values of a call")
    if not found and name not in _SIZED:
        raise Refuse("it is made anew, of a size and no values")
    if name in _WEIGHTED and any(given.op == "get_attr" for given in found):
        raise Refuse("features are chosen, which are places of its weight")
    if name == "unflatten" and _unflattens(node, dim):
        raise Refuse("it is told how long the dimension is")
    if name == "squeeze" and not _squeezes_others(node, found):
        raise Refuse("it would drop the dimension of what is chosen")
    return found


def _unflattens(node: Node, dim: int) -> bool:
    given = node.all_input_nodes[0]
    first = argument(node, 1, "dim") % len(recorded_sizes(given) or (1,))
    return bool(first <= dim < first + len(argument(node, 2, "sizes")))


def _squeezes_others(node: Node, found: Mapping[Node, int]) -> bool:
    dims = argument(node, 1, "dim")
    dims = [dims] if isinstance(dims, int) else dims
    given = node.all_input_nodes[0]
    rank = len(recorded_sizes(given) or ())
    return bool(dims) and found.get(given) not in {d % rank for d in dims}


def narrowed(edit: Editor, node: Node, cuts: Mapping[Node, int], selection: Selection, count: int) -> Node:
    """A call like this one that computes only these places."""
    parts = {given: selection.of(given, dim, edit, node) for given, dim in cuts.items()}

    def part(given: Node) -> Node:
        return parts.get(given, given)

    args, kwargs = map_arg(node.args, part), map_arg(node.kwargs, part)
    target: Any = node.target
    if name_of(node) in _SIZED:
        target, args = _resized(node, args, selection.dim, count)
    attention = match_attention(node)
    if attention is not None and attention.is_causal and selection.dim == len(recorded_sizes(node) or ()) - 2:
        args, kwargs = args[:3], {"scale": attention.scale, "enable_gqa": attention.enable_gqa}
        kwargs = {name: value for name, value in kwargs.items() if value}
        mask = causal_rows(edit, node, attention.query, attention.key, selection)
        kwargs |= {} if mask is None else {"attn_mask": mask}
    return edit.call(node, f".{target}" if node.op == "call_method" else target, *args, **kwargs)


def _resized(node: Node, args: tuple[Any, ...], dim: int, count: int) -> tuple[Any, tuple[Any, ...]]:
    """The target and the arguments of a reshape or an expansion to another size along one dimension."""
    name = name_of(node)
    target: Any = aten.reshape.default if name in _RESHAPES else aten.expand.default
    sizes = list(args[1]) if isinstance(args[1], list | tuple) else list(args[1:])
    sizes[dim] = -1 if name not in _RESHAPES and sizes[dim] == -1 else count
    if node.op == "call_method":
        target = "reshape" if name in _RESHAPES else "expand"
    return target, (args[0], sizes)


def causal_rows(edit: Editor, node: Node, query: Node, key: Node, selection: Selection) -> Node | None:
    """The rows of a causal mask (aligned at the top left, as torch does) for the chosen queries; None where these may
    look at everything."""
    queries, keys = (example_value(value) for value in (query, key))
    if queries is None or keys is None:
        raise AssertionError("followed dimensions are known of recorded values only")
    square = surely_equal(queries.shape[-2], keys.shape[-2])
    if selection.is_last() and square:
        return None
    device = edit.call(node, getattr, key, "device")
    rows, columns = (
        edit.call(node, torch.arange, _length(edit, node, value), device=device)
        for value in (key if square else query, key)
    )
    chosen = selection.of(rows, 0, edit, node)
    return edit.call(node, aten.le.Tensor, columns, edit.call(node, aten.unsqueeze.default, chosen, 1))


def _length(edit: Editor, node: Node, value: Node) -> Any:
    size = value.meta["val"].shape[-2]
    return size if isinstance(size, int) else edit.call(node, aten.sym_size.int, value, value.meta["val"].dim() - 2)
