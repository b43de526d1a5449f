"""A node as plain data, with names in the place of nodes; and when two values in it are the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.fx.node import map_aggregate


@dataclass(slots=True, unsafe_hash=True)
class Ref:
    """Stands for a node, by name, inside recorded arguments. Like the record itself it is never changed."""

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
class FormatName:
    """Stands for a memory format or a layout: `torch.save` can pickle neither."""

    path: str

    def resolve(self) -> Any:
        """The format or layout itself."""
        return getattr(torch, self.path.removeprefix("torch."))


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
        name, op, target, args, kwargs, type_ = state
        values = (name, op, *(map_aggregate(f, resolve_name) for f in (target, args, kwargs)), type_)
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


def by_name(value: Any) -> Any:
    """A name for a value that cannot be pickled; another value as it is."""
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return OperatorName(str(value))
    if isinstance(value, torch.memory_format | torch.layout):
        return FormatName(str(value))
    return value


def resolve_name(value: Any) -> Any:
    """What a name stands for."""
    return value.resolve() if isinstance(value, OperatorName | FormatName) else value


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
    except (AttributeError, RuntimeError, TypeError, ValueError):  # what cannot be compared is only equal to itself
        return False
