"""A node as plain data, with names in the place of nodes: compared, pickled, and made a node again.

torch.fx pickles generated code and traces it again, which renames nodes and computes everything that depends on
parameters and buffers alone for good (a weight-norm, an expanded buffer). A graph that is stored here comes back node
for node, name for name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from refold import fx_private

_ATOMS = frozenset({int, float, bool, str, NoneType})
_STORED_META = ("is_wrapped", "stack_trace", "nn_module_stack")


@dataclass(slots=True, unsafe_hash=True)
class Ref:
    """Stands for a node, by name, inside recorded arguments. Like the record itself it is never changed."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True, slots=True)
class TorchName:
    """Stands for an operator, a memory format or a layout in a record that is pickled: they cannot be, all of them."""

    path: str

    def resolve(self) -> Any:
        """What stands in torch at this path."""
        found: Any = torch
        for part in self.path.split("."):
            found = getattr(found, part)
        return found


@dataclass(slots=True)
class NodeRecord:
    """A node as plain data. It is never changed; it is not frozen, because that makes it thrice as slow to make."""

    name: str
    op: str
    target: Any
    args: Any
    kwargs: Any
    type: Any

    def __str__(self) -> str:
        values = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        target = self.target if isinstance(self.target, str) else function_name(self.target)
        return f"{self.name} = {self.op} {target}({', '.join(values)})"

    def __getstate__(self) -> tuple[Any, ...]:
        fields = (self.target, self.args, self.kwargs)
        return (self.name, self.op, *(map_aggregate(f, by_name) for f in fields), self.type)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        first, op, target, args, kwargs, type_ = state
        values = (first, op, *(map_aggregate(f, resolve_name) for f in (target, args, kwargs)), type_)
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> NodeRecord:
        return self  # immutable all through


def function_name(function: Any) -> str:
    """A readable name of what a node calls."""
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(function)
    module = getattr(function, "__module__", None) or ""
    name = getattr(function, "__name__", None) or str(function)
    return name if module in ("builtins", "_operator") else f"{module}.{name}".removeprefix(".")


def by_name(value: Any) -> Any:
    """A name for a value that cannot be pickled; another value as it is."""
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return TorchName(f"ops.{value}")
    if isinstance(value, torch._ops.HigherOrderOperator):
        return TorchName(f"ops.higher_order.{value.name()}")
    if isinstance(value, torch.memory_format | torch.layout):
        return TorchName(str(value).removeprefix("torch."))
    return value


def resolve_name(value: Any) -> Any:
    """What a name stands for."""
    return value.resolve() if isinstance(value, TorchName) else value


# --- from nodes to records and back --------------------------------------------------------------------------------


def to_refs(value: Any, names: Mapping[Node, str] | None = None) -> Any:
    """Arguments with names in the place of nodes; `names` has those that nodes had, if not those of now."""
    known = names or {}

    def refer(item: Any) -> Any:
        return Ref(known.get(item, item.name)) if isinstance(item, Node) else item

    return refer(value) if type(value) is Node else map_aggregate(value, refer)


def from_refs(value: Any, nodes: Mapping[str, Node]) -> Any:
    """Arguments with nodes in the place of names."""
    return map_aggregate(value, lambda item: nodes[item.name] if isinstance(item, Ref) else item)


def record_node(node: Node) -> NodeRecord:
    """A node as plain data."""
    return record_row(fx_private.rows_of([node])[0])


def record_row(row: fx_private.Row, names: Mapping[Node, str] | None = None) -> NodeRecord:
    """A node of a snapshot as plain data; `names` has the names that nodes had then, if not those of now."""
    _node, name, op, target, args, kwargs, type_ = row
    plain = tuple([to_refs(a, names) if type(a) not in _ATOMS else a for a in args])
    return NodeRecord(name, op, target, plain, to_refs(kwargs, names) if kwargs else kwargs, type_)


def add_nodes(graph: Graph, records: Sequence[NodeRecord]) -> None:
    """Make the nodes of an empty graph from records, with their very names."""
    made: dict[str, Node] = {}
    for r in records:
        args, kwargs = from_refs(r.args, made), from_refs(r.kwargs, made)
        made[r.name] = graph.create_node(r.op, r.target, args, kwargs, r.name, r.type)
    fx_private.rename_nodes(graph, [r.name for r in records])


# --- a graph that pickles ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredTensor:
    """A value's dtype and example size: enough to know its rank again."""

    dtype: torch.dtype
    sizes: tuple[int, ...]


StoredGraph = list[tuple[NodeRecord, dict[str, Any]]]
"""The nodes in order, each with what is kept of its metadata."""


def store_graph(graph: Graph) -> StoredGraph:
    """The nodes of a graph as plain data that pickles."""
    return [(record_node(node), _store_meta(node.meta)) for node in graph.nodes]


def load_graph(stored: StoredGraph) -> Graph:
    """The graph again; every node has its old name."""
    graph = Graph()
    add_nodes(graph, [record for record, _meta in stored])
    for node, (_record, meta) in zip(graph.nodes, stored, strict=True):
        node.meta = {key: _load_value(value) for key, value in meta.items()}
    return graph


def _store_meta(meta: dict[str, Any]) -> dict[str, Any]:
    kept = {key: meta[key] for key in _STORED_META if key in meta}
    value = _store_value(meta.get("val"))
    return kept if value is None else kept | {"val": value}


def _store_value(value: Any) -> Any:
    """Symbolic sizes are stored as those of the example."""
    try:
        if isinstance(value, torch.Tensor):
            return StoredTensor(value.dtype, tuple(_hint(size) for size in value.shape))
        if isinstance(value, torch.SymInt | int):
            return _hint(value)
        if isinstance(value, tuple | list):
            return tuple(map(_store_value, value))
    except (TypeError, ValueError, AttributeError):
        pass
    return None


def _hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _load_value(value: Any) -> Any:
    if isinstance(value, StoredTensor):
        return torch.empty(value.sizes, dtype=value.dtype, device="meta")
    return tuple(map(_load_value, value)) if isinstance(value, tuple) else value


# --- values --------------------------------------------------------------------------------------------------------


class _Missing:
    """Stands for 'there was no such key'."""

    def __reduce__(self) -> str:
        return "MISSING"


MISSING = _Missing()


def same_value(a: Any, b: Any) -> bool:
    """Equal in value and in kind: 49 is not 49.0, True is not 1, 0.0 is not -0.0, a tensor is only itself."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, torch.Tensor | nn.Module):
        return False
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_value(v, b[k]) for k, v in a.items())
    if isinstance(a, slice):
        return same_value((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, float):
        return repr(a) == repr(b)
    try:
        return bool(a == b)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # what cannot be compared is only equal to itself
        return False
