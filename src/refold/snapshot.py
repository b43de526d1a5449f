"""A photograph of a GraphModule as plain data: to compare with another, and to put the module back to."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from refold import fx_private
from refold.releasing import Ledger


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a node, by name, inside recorded arguments."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True, slots=True)
class OperatorName:
    """Stands for an operator overload, which cannot be pickled, in a record that is."""

    path: str

    def resolve(self) -> Any:
        """The operator itself."""
        found: Any = torch.ops
        for part in self.path.split("."):
            found = getattr(found, part)
        return found


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """A node as plain data."""

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
        return (self.name, self.op, *(map_aggregate(f, _name_operator) for f in fields), self.type)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        name, op, target, args, kwargs, type_ = state
        values = (name, op, *(map_aggregate(f, _resolve_operator) for f in (target, args, kwargs)), type_)
        for slot, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, slot, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> NodeRecord:
        return self  # immutable all through


def function_name(function: Any) -> str:
    """A readable name of what a node calls."""
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(function)
    module = getattr(function, "__module__", None) or ""
    name = getattr(function, "__name__", None) or str(function)
    return name if module in ("builtins", "_operator") else f"{module}.{name}".removeprefix(".")


def _name_operator(value: Any) -> Any:
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return OperatorName(str(value))
    return value


def _resolve_operator(value: Any) -> Any:
    return value.resolve() if isinstance(value, OperatorName) else value


def to_refs(value: Any) -> Any:
    """Arguments with names in the place of nodes."""

    def refer(item: Any) -> Any:
        return Ref(item.name) if isinstance(item, Node) else item

    return map_aggregate(value, refer)


def record_node(node: Node) -> NodeRecord:
    """A node as plain data."""
    return NodeRecord(node.name, node.op, node.target, to_refs(node.args), to_refs(node.kwargs), node.type)


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
    except Exception:  # an object whose comparison fails is only equal to itself
        return False


@dataclass(slots=True)
class ModuleRecord:
    """What a module has, by reference; of its tables and of containers that torch writes into, what they held."""

    module: nn.Module
    everything: dict[str, Any]
    tables: dict[str, dict[str, Any]]
    contents: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleRecord:
        """Photograph one module."""
        everything = fx_private.all_attributes(module)
        contents = fx_private.containers(everything)
        if isinstance(module, torch.jit.ScriptModule):
            return cls(module, everything, {}, contents)
        return cls(module, everything, {name: everything[name].copy() for name in fx_private.TABLES}, contents)

    @classmethod
    def look(cls, module: nn.Module) -> ModuleRecord:
        """A module as it is, without copies: only to be compared, at once."""
        everything = module.__dict__
        if isinstance(module, torch.jit.ScriptModule):
            return cls(module, everything, {}, {})
        return cls(module, everything, {name: everything[name] for name in fx_private.TABLES}, {})

    @property
    def attributes(self) -> dict[str, Any]:
        """The plain attributes."""
        return fx_private.without_tables(self.module, self.everything)

    def restore(self) -> None:
        """Put the module back as it was photographed."""
        attributes = self.attributes
        for name in set(fx_private.plain_attributes(self.module)) - set(attributes):
            fx_private.drop_plain_attribute(self.module, name)
        for name, value in attributes.items():
            fx_private.set_plain_attribute(self.module, name, value)
        for name in fx_private.filled_containers(self.module, self.contents):
            fx_private.fill_container(attributes[name], self.contents.get(name))
        for name, entries in self.tables.items():
            live = fx_private.table(self.module, name)
            live.clear()
            live.update(entries)

    def is_untouched(self) -> bool:
        """Whether the module is as it was photographed; fast, and False when in doubt."""
        return not self.contents and fx_private.has_just(self.module, self.everything, self.tables)

    def changed_attributes(self) -> dict[str, Any]:
        """The plain attributes that the module no longer has as they were here, as they were here."""
        changed: dict[str, Any] = {}
        if not fx_private.has_all_attributes(self.module, self.everything):
            old, new = self.attributes, fx_private.plain_attributes(self.module)
            keys = [k for k in {**old, **new} if not same_value(old.get(k, MISSING), new.get(k, MISSING))]
            changed = {k: old.get(k, MISSING) for k in keys}
        for name in fx_private.filled_containers(self.module, self.contents):
            now = self.module.__dict__[name]
            then = type(now)(self.contents.get(name, ()))
            if then != now:
                changed[name] = then
        return changed


@dataclass
class Snapshot:
    """A GraphModule at one moment."""

    graph: fx_private.GraphState
    modules: dict[str, ModuleRecord]
    base_counts: dict[str, int]
    used_names: set[str]
    memory: list[tuple[torch.Tensor, int | None, int | None]] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    """Weights whose memory was given up since."""

    @classmethod
    def of(cls, gm: GraphModule) -> Snapshot:
        """Photograph a module. Linear in nodes and modules; no tensor is copied."""
        modules = {path: ModuleRecord.of(module) for path, module in fx_private.walk_modules(gm)}
        memory = [(t, fx_private.version_of(t), fx_private.address_of(t)) for t in _tensors(modules)]
        counts, names = fx_private.base_counts(gm.graph), fx_private.used_names(gm.graph)
        return cls(fx_private.graph_state(gm), modules, counts, names, memory)

    @classmethod
    def look(cls, gm: GraphModule) -> Snapshot:
        """A module as it is, without the copies that restoring needs: only to be compared, before it changes."""
        modules = {path: ModuleRecord.look(module) for path, module in fx_private.walk_modules(gm)}
        counts, names = fx_private.base_counts(gm.graph), fx_private.used_names(gm.graph)
        return cls(fx_private.look_at_graph(gm), modules, counts, names)

    def restore(self, gm: GraphModule) -> None:
        """Put a module back to this photograph, object for object, whatever state it is in. Can be called again."""
        for record in self.modules.values():
            record.restore()
        fx_private.restore_graph(gm, self.graph)
        for tensor, _version, address in self.memory:
            if fx_private.address_of(tensor) != address:  # it was made a view of a merged one
                tensor.data = tensor.data.clone()

    @cached_property
    def nodes(self) -> dict[str, tuple[Node, tuple[Any, ...]]]:
        """name -> (node, (name, op, target, args, kwargs, type, meta, …)), in graph order."""
        return {fields[0]: (node, fields) for node, fields, _uses, _repr in self.graph[1]}

    def unsorted_users(self) -> dict[str, tuple[str, ...]]:
        """The users of nodes that have theirs in another order than the graph's."""
        place = {node: (i, name) for i, (name, (node, _)) in enumerate(self.nodes.items())}
        found = {}
        for _node, fields, (users, _inputs), _repr in self.graph[1]:
            places = [place[user] for user in users] if len(users) > 1 else []
            if places != sorted(places):
                found[fields[0]] = tuple(name for _, name in places)
        return found

    @property
    def codegen(self) -> Any:
        """The code generator of the graph."""
        return self.graph[3]

    def tensors(self, besides: Container[int] = ()) -> dict[str, torch.Tensor]:
        """Every parameter and buffer by its full name, also under a second name, besides those of some ids."""
        named: dict[str, torch.Tensor] = {}
        for path, record in self.modules.items():
            prefix = path + "." if path else ""
            for table in (record.tables.get("_parameters"), record.tables.get("_buffers")):
                if table:
                    named |= {prefix + k: t for k, t in table.items() if t is not None and id(t) not in besides}
        return named

    def written_in_place(self) -> list[torch.Tensor]:
        """Tensors of this photograph that were written to since."""
        return [tensor for tensor, version, _ in self.memory if fx_private.version_of(tensor) != version]


def _tensors(modules: dict[str, ModuleRecord]) -> list[torch.Tensor]:
    tables = [r.tables[name] for r in modules.values() for name in ("_parameters", "_buffers") if name in r.tables]
    return [tensor for entries in tables for tensor in entries.values() if isinstance(tensor, torch.Tensor)]
