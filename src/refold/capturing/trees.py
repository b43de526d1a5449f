"""Arguments and results as trees: which tensors they hold, where, and how to put them together again."""

from __future__ import annotations

import dataclasses
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from refold.plain_objects import attributes_of, class_named, is_named, new_object, return_type

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A tensor: the place it has among the flat values."""

    index: int


@dataclasses.dataclass(frozen=True)
class Constant:
    """A value that is no tensor and stays as it was at capture."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Branch:
    """A container: its class, its keys (None for sequences) and what it holds; or an object with its attributes."""

    cls: type
    keys: tuple[Any, ...] | None
    children: tuple[Tree, ...]
    is_object: bool = False


Tree = Leaf | Constant | Branch


class Opaque(Exception):
    """An object that is neither a tensor, a plain value, nor a container that could be taken apart."""

    def __init__(self, where: str, value: object) -> None:
        super().__init__(f"{where or 'the value'} is a {type(value).__module__}.{type(value).__qualname__}")
        self.where = where


def flatten(value: Any, leaves: list[Any], where: str = "", left_out: list[str] | None = None) -> Tree:
    """Take ``value`` apart: its tensors are appended to ``leaves``, the rest is the tree.

    An object that cannot be taken apart raises `Opaque`. Where ``left_out`` is given, ``value`` is a result: objects
    that are nothing but their attributes are taken apart too, and others are left out and named there.
    """
    if isinstance(value, (torch.Tensor, fx.Proxy, *SYMBOLS)):
        leaves.append(value)
        return Leaf(len(leaves) - 1)
    if isinstance(value, PLAIN) and not hasattr(value, "_fields"):
        return Constant(value)
    parts = _open(value)
    if parts is None:
        if left_out is None:
            raise Opaque(where, value)
        return _flatten_object(value, leaves, where, left_out)
    keys, values = parts
    names = keys if keys is not None else range(len(values))
    children = tuple(
        flatten(v, leaves, f"{where}.{k}" if where else str(k), left_out) for k, v in zip(names, values, strict=True)
    )
    return Branch(type(value), keys, children)


def _flatten_object(value: Any, leaves: list[Any], where: str, left_out: list[str]) -> Tree:
    """All of an object, or nothing of it."""
    before = len(leaves)
    try:
        return _attributes(value, leaves, frozenset())
    except Opaque:
        del leaves[before:]
        left_out.append(f"{where} ({type(value).__name__})")
        return Constant(None)


def _attributes(value: Any, leaves: list[Any], around: frozenset[int]) -> Tree:
    """As `flatten`, inside of an object: classes may be values there, and objects hold objects (but not themselves)."""
    if isinstance(value, type) and is_named(value):
        return Constant(value)
    is_simple = isinstance(value, (torch.Tensor, fx.Proxy, *SYMBOLS, *PLAIN)) and not hasattr(value, "_fields")
    if is_simple:
        return flatten(value, leaves)
    parts, attributes = _open(value), attributes_of(value)
    if id(value) in around or (parts is None and attributes is None):
        raise Opaque("", value)
    around |= {id(value)}
    if parts is not None:
        return Branch(type(value), parts[0], tuple(_attributes(v, leaves, around) for v in parts[1]))
    assert attributes is not None
    children = tuple(_attributes(v, leaves, around) for v in attributes.values())
    return Branch(type(value), tuple(attributes), children, is_object=True)


def _open(value: Any) -> tuple[tuple[Any, ...] | None, tuple[Any, ...]] | None:
    """The keys and values of a container, or None for anything that is not one."""
    if isinstance(value, Mapping) and (type(value) in (dict, OrderedDict) or dataclasses.is_dataclass(value)):
        return tuple(value.keys()), tuple(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(f.name for f in dataclasses.fields(value) if f.init)
        return names, tuple(getattr(value, name) for name in names)
    is_sequence = type(value) in (tuple, list) or _is_struct(type(value))
    if is_sequence or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return None, tuple(value)
    return None


def _is_struct(cls: type) -> bool:
    """What torch gives several values in, such as ``torch.return_types.topk``: it is made of one sequence."""
    return cls.__module__ == "torch.return_types"


def rebuild(tree: Tree, leaves: Sequence[Any]) -> Any:
    """The value again, with ``leaves`` in place of its tensors."""
    if isinstance(tree, Leaf):
        return leaves[tree.index]
    if isinstance(tree, Constant):
        return tree.value
    children = [rebuild(child, leaves) for child in tree.children]
    return _construct(tree, children, lambda function, args, kwargs: function(*args, **kwargs))


def emit(tree: Tree, leaves: Sequence[Any], graph: fx.Graph) -> Any:
    """The same in a graph: plain containers are written as they are, classes as a call of the class."""
    if isinstance(tree, Leaf):
        return leaves[tree.index]
    if isinstance(tree, Constant):
        is_class = isinstance(tree.value, type)
        return _call_of(graph, class_named, _name_of(tree.value), {}) if is_class else tree.value
    children = [emit(child, leaves, graph) for child in tree.children]
    return _construct(tree, children, lambda function, args, kwargs: _call_of(graph, function, args, kwargs))


def _name_of(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _construct(tree: Branch, children: list[Any], call: Callable[[Callable[..., Any], tuple, dict], Any]) -> Any:
    if tree.is_object:
        assert tree.keys is not None
        return call(new_object, (*_name_of(tree.cls), dict(zip(tree.keys, children, strict=True))), {})
    if tree.cls is tuple:
        return tuple(children)
    if tree.cls is list:
        return children
    if _is_struct(tree.cls):
        return call(return_type, (tree.cls.__name__, tuple(children)), {})
    if tree.keys is None:
        return call(tree.cls, tuple(children), {})
    entries = dict(zip(tree.keys, children, strict=True))
    if tree.cls is dict:
        return entries
    if tree.cls is OrderedDict:
        return call(OrderedDict, (list(entries.items()),), {})
    # an entry that is None is one that the class was not given
    return call(tree.cls, (), {k: v for k, v in entries.items() if v is not None or not issubclass(tree.cls, Mapping)})


def _call_of(graph: fx.Graph, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> fx.Node:
    node = graph.call_function(function, args, kwargs)
    # fx writes a torch.fx.wrap for this name, so that re-tracing (unpickling does it) records the call, not runs it
    node.meta["is_wrapped"] = True
    return node


def select(tree: Tree, node: fx.Node, graph: fx.Graph) -> Iterator[tuple[int, fx.Node]]:
    """Nodes that take the tensors out of the argument ``node``: (index among the leaves, node)."""
    if isinstance(tree, Leaf):
        yield tree.index, node
    if not isinstance(tree, Branch):
        return
    by_name = tree.keys is not None and not issubclass(tree.cls, Mapping)
    for key, child in zip(tree.keys or range(len(tree.children)), tree.children, strict=True):
        if not holds_tensors(child):
            continue
        part = graph.call_function(getattr if by_name else operator.getitem, (node, key))
        yield from select(child, part, graph)


def holds_tensors(tree: Tree) -> bool:
    """Whether there is any tensor in it."""
    return isinstance(tree, Leaf) or (isinstance(tree, Branch) and any(map(holds_tensors, tree.children)))


def same_shape(one: Tree, other: Tree, same_classes: bool = False) -> bool:
    """Whether two values have the same containers and the same plain values (leaves are compared elsewhere)."""
    if isinstance(one, Branch) and isinstance(other, Branch):
        if one.keys != other.keys or len(one.children) != len(other.children):
            return False
        if same_classes and one.cls is not other.cls:
            return False
        return all(same_shape(a, b, same_classes) for a, b in zip(one.children, other.children, strict=True))
    if isinstance(one, Constant) and isinstance(other, Constant):
        return type(one.value) is type(other.value) and one.value == other.value
    return type(one) is type(other)
