"""A graph as plain data that pickles: node for node, name for name.

torch.fx pickles generated code and traces it again, which renames nodes and computes everything that depends on
parameters and buffers alone for good (a weight-norm, an expanded buffer). A captured graph comes back as it was.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from refold.node_record import by_name, resolve_name

_KEPT_META = ("is_wrapped", "stack_trace", "nn_module_stack")


@dataclasses.dataclass(frozen=True)
class Ref:
    """Stands for a node in stored arguments."""

    name: str


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A value's dtype and example size: enough to know its rank again."""

    dtype: torch.dtype
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StoredNode:
    """One node: targets that do not pickle are kept as (kind, name)."""

    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    type: Any
    meta: dict[str, Any]


def store_graph(graph: fx.Graph) -> list[StoredNode]:
    """The nodes of a graph as plain data."""
    return [_store_node(node) for node in graph.nodes]


def _store_node(node: fx.Node) -> StoredNode:
    meta = {k: node.meta[k] for k in _KEPT_META if k in node.meta}
    value = _store_value(node.meta.get("val"))
    if value is not None:
        meta["val"] = value
    args, kwargs = _map(node.args, _to_ref), _map(node.kwargs, _to_ref)
    return StoredNode(node.op, node.name, _store_target(node.target), args, kwargs, node.type, meta)


def load_graph(nodes: list[StoredNode]) -> fx.Graph:
    """The graph again; every node has its old name."""
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}

    def from_ref(value: Any) -> Any:
        return made[value.name] if isinstance(value, Ref) else resolve_name(value)

    for stored in nodes:
        args, kwargs = _map(stored.args, from_ref), _map(stored.kwargs, from_ref)
        node = graph.create_node(
            stored.op, _load_target(stored.target), args, kwargs, name=stored.name, type_expr=stored.type
        )
        node.meta = {k: _load_value(v) for k, v in stored.meta.items()}
        made[stored.name] = node
    return graph


def _to_ref(value: Any) -> Any:
    return Ref(value.name) if isinstance(value, fx.Node) else by_name(value)


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change every leaf of nested plain containers; fx's own immutable ones become plain."""
    if isinstance(value, tuple):
        return tuple(_map(v, change) for v in value)
    if isinstance(value, list):
        return [_map(v, change) for v in value]
    if isinstance(value, Mapping):
        return {k: _map(v, change) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(_map(value.start, change), _map(value.stop, change), _map(value.step, change))
    return change(value)


def _store_target(target: Any) -> Any:
    if isinstance(target, torch._ops.OpOverload):
        return ("operator", str(target))
    if isinstance(target, torch._ops.HigherOrderOperator):
        return ("higher order", target.name())
    return target


def _load_target(target: Any) -> Any:
    if not isinstance(target, tuple):
        return target
    kind, name = target
    if kind == "higher order":
        return getattr(torch.ops.higher_order, name)
    namespace, operator, overload = name.split(".")
    if not hasattr(torch.ops, namespace):
        importlib.import_module(namespace)
    return getattr(getattr(getattr(torch.ops, namespace), operator), overload)


def _store_value(value: Any) -> Any:
    """Symbolic sizes are stored as those of the example."""
    try:
        if isinstance(value, torch.Tensor):
            return StoredTensor(value.dtype, tuple(_hint(size) for size in value.shape))
        if isinstance(value, (torch.SymInt, int)):
            return _hint(value)
        if isinstance(value, (tuple, list)):
            return tuple(map(_store_value, value))
    except (TypeError, ValueError, AttributeError):
        pass
    return None


def _hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _load_value(value: Any) -> Any:
    if isinstance(value, StoredTensor):
        return torch.empty(value.sizes, dtype=value.dtype, device="meta")
    if isinstance(value, tuple):
        return tuple(map(_load_value, value))
    return value
