"""The one walker of nested values: taken apart into leaves and a tree, put together again, named, mapped and copied.

Every walk opens tuples, lists, dicts and named tuples. What else it opens depends on what the value is for, see
`Opening`; the table in ``tests/test_nested.py`` shows all answers side by side.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import sys
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree

from refold.fingerprint import same_bits
from refold.runtime import class_named, new_object, return_type

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)

Make = Callable[[Sequence[Any]], Any]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A tensor: its index among the leaves."""

    index: int

    def __str__(self) -> str:
        return "*"


@dataclasses.dataclass(frozen=True)
class Constant:
    """A value that is no tensor and stays as it is."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Branch:
    """A container: its class, its keys (None for sequences) and what it holds; or an object with its attributes."""

    cls: type
    keys: tuple[Any, ...] | None
    children: tuple[Tree, ...]
    is_object: bool = False
    spec: pytree.TreeSpec | None = None
    """How torch's pytree makes a container of a registered class."""

    def __str__(self) -> str:
        parts = map(str, self.children) if self.keys is None else map("{}: {}".format, self.keys, self.children)
        return f"{self.cls.__name__}({', '.join(parts)})"

    def items(self) -> Iterator[tuple[Any, Tree]]:
        """What it holds, by key or by position."""
        return zip(range(len(self.children)) if self.keys is None else self.keys, self.children, strict=True)


Tree = Leaf | Constant | Branch


class Opaque(Exception):
    """An object that is neither a tensor, a plain value, nor a container that could be taken apart."""

    def __init__(self, where: str, value: object) -> None:
        super().__init__(f"{where or 'the value'} is a {type(value).__module__}.{type(value).__qualname__}")
        self.value = value


@dataclasses.dataclass(frozen=True)
class Opening:
    """Which values are leaves, which are opened, and what becomes of those that are neither."""

    leaves: tuple[type, ...] = (torch.Tensor, fx.Proxy, *SYMBOLS)
    registered: bool = False
    """Open what is registered with torch's pytree (ModelOutputs, deques); else OrderedDicts and dataclasses."""
    objects: bool = False
    """Open objects that are nothing but their attributes."""
    others: Literal["refused", "constant", "leaf"] = "refused"


ARGUMENT = Opening()  # of a captured graph
RESULT = Opening(objects=True)  # of a captured graph
CALL = Opening((torch.Tensor,), registered=True, others="constant")  # of an executor
OUTPUT = Opening((torch.Tensor,), registered=True, objects=True, others="constant")  # of an executor
STRUCTURE = Opening((), registered=True, others="leaf")  # of the call of an executor: constants are leaves too


def flatten(value: Any, opening: Opening, left_out: list[str] | None = None) -> tuple[Tree, list[Any]]:
    """The tree of a value, and its leaves. What is refused raises `Opaque`; where ``left_out`` is given, it is left out
    and named there."""
    leaves: list[Any] = []
    return _Flattening(opening, leaves).tree(value, "", frozenset(), left_out), leaves


def flatten_argument(value: Any, leaves: list[Any], name: str) -> Tree:
    """The tree of an argument of a graph; its leaves are appended to those of the arguments before it."""
    return _Flattening(ARGUMENT, leaves).tree(value, name, frozenset(), None)


@dataclasses.dataclass(frozen=True)
class _Flattening:
    opening: Opening
    leaves: list[Any]

    def tree(self, value: Any, where: str, around: frozenset[int], left_out: list[str] | None) -> Tree:
        """``around`` are the containers and objects that hold the value: none of them is opened once more."""
        if isinstance(value, self.opening.leaves) or (self.opening.others == "leaf" and isinstance(value, PLAIN)):
            return self._leaf(value)
        if isinstance(value, PLAIN) or (self.opening.objects and isinstance(value, type) and is_named(value)):
            return Constant(value)
        parts = None if id(value) in around else _open(value, self.opening.registered)
        if parts is None:
            return self._object(value, where, around, left_out)
        keys, values, spec = parts
        names = keys if keys is not None else range(len(values))
        around |= {id(value)}
        children = tuple(
            self.tree(v, f"{where}.{k}" if where else str(k), around, left_out)
            for k, v in zip(names, values, strict=True)
        )
        return Branch(type(value), keys, children, spec=spec)

    def _leaf(self, value: Any) -> Leaf:
        self.leaves.append(value)
        return Leaf(len(self.leaves) - 1)

    def _object(self, value: Any, where: str, around: frozenset[int], left_out: list[str] | None) -> Tree:
        """All of an object, or nothing of it."""
        before = len(self.leaves)
        try:
            if id(value) in around:
                raise Opaque(where, value)
            attributes = attributes_of(value) if self.opening.objects else None
            if attributes is None:
                return self._other(value, where)
            around |= {id(value)}
            children = tuple(self.tree(v, f"{where}.{k}", around, None) for k, v in attributes.items())
        except Opaque:
            if left_out is None:
                raise
            del self.leaves[before:]
            left_out.append(f"{where} ({type(value).__name__})")
            return Constant(None)
        if self.opening.others == "constant" and len(self.leaves) == before:
            return Constant(value)
        return Branch(type(value), tuple(attributes), children, is_object=True)

    def _other(self, value: Any, where: str) -> Tree:
        if self.opening.others == "refused":
            raise Opaque(where, value)
        return Constant(value) if self.opening.others == "constant" else self._leaf(value)


def _open(value: Any, registered: bool) -> tuple[tuple[Any, ...] | None, tuple[Any, ...], Any] | None:
    """The keys, the values and the spec of a container, or None for anything that is not one."""
    cls = type(value)
    if cls in (tuple, list):
        return None, tuple(value), None
    if cls is dict:
        return tuple(value), tuple(value.values()), None
    if registered and pytree.tree_is_leaf(value):
        return None
    if isinstance(value, Mapping) and (cls is OrderedDict or dataclasses.is_dataclass(value)):
        return tuple(value.keys()), tuple(value.values()), None
    if registered:
        children, spec = pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
        return None, tuple(children), spec
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(f.name for f in dataclasses.fields(value) if f.init)
        return names, tuple(getattr(value, name) for name in names), None
    is_sequence = _is_struct(cls) or (isinstance(value, tuple) and hasattr(value, "_fields"))
    return (None, tuple(value), None) if is_sequence else None


def _is_struct(cls: type) -> bool:
    """What torch gives several values in, such as ``torch.return_types.topk``: it is made of one sequence."""
    return cls.__module__ == "torch.return_types"


def rebuild(tree: Tree, leaves: Sequence[Any]) -> Any:
    """The value again, with ``leaves`` in place of its own."""
    if isinstance(tree, Leaf):
        return leaves[tree.index]
    if isinstance(tree, Constant):
        return tree.value
    return construct(tree, [rebuild(child, leaves) for child in tree.children], _call)


def _call(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def class_name(cls: type) -> tuple[str, str]:
    """The module and the name by which `class_named` finds a class."""
    return cls.__module__, cls.__qualname__


def construct(tree: Branch, children: list[Any], call: Callable[[Callable[..., Any], tuple, dict], Any]) -> Any:
    """A container of these children; classes are called through ``call``, which may write the call into a graph."""
    if tree.spec is not None:
        return pytree.tree_unflatten(children, tree.spec)
    if tree.is_object:
        assert tree.keys is not None
        return call(new_object, (*class_name(tree.cls), dict(zip(tree.keys, children, strict=True))), {})
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


def rebuilder(tree: Tree) -> Make:
    """A function of the leaves that gives what `rebuild` gives, faster: for values that are made at every call."""
    if isinstance(tree, Leaf):
        return itemgetter(tree.index)
    if isinstance(tree, Constant):
        return lambda _: tree.value
    cls, parts = tree.cls, [rebuilder(child) for child in tree.children]
    if cls in (tuple, list):
        return lambda leaves: cls([part(leaves) for part in parts])
    if cls is dict:
        named = dict(zip(tree.keys or (), parts, strict=True))
        return lambda leaves: {key: part(leaves) for key, part in named.items()}
    quick = _model_output_rebuilder(tree, parts) if issubclass(cls, Mapping) else None
    return quick or (lambda leaves: construct(tree, [part(leaves) for part in parts], _call))


def _model_output_rebuilder(tree: Branch, parts: list[Make]) -> Make | None:
    """A `ModelOutput` of transformers goes through its fields three times while it is made, which shows in small
    models. What it is made into depends only on which of its fields are None, so one is made as an example, and the
    next ones get the same attributes and items. None for classes that make something else of their fields."""
    cls: Any = tree.cls
    base = getattr(sys.modules.get("transformers.utils.generic"), "ModelOutput", None)
    if base is None or not issubclass(cls, base) or cls.__post_init__ is not base.__post_init__:
        return None
    given = [rebuild(child, defaultdict(lambda: torch.empty(0))) for child in tree.children]  # type: ignore[arg-type]
    example = construct(tree, given, _call)
    keys, attributes = list(example), vars(example).copy()
    named = dict(zip(tree.keys or (), parts, strict=True))
    held = [attributes.get(name) for name in named]
    if not set(keys) <= named.keys() or any(a is not b for a, b in zip(held, given, strict=True)):
        return None
    new, put = OrderedDict.__new__, OrderedDict.__setitem__

    def make(leaves: Sequence[Any]) -> Any:
        made: Any = new(cls)
        state = made.__dict__
        state.update(attributes)
        for name, part in named.items():
            state[name] = part(leaves)
        for key in keys:
            put(made, key, state[key])
        return made

    return make


def same_shape(one: Tree, other: Tree, same_classes: bool = False) -> bool:
    """Whether two values have the same containers and the same constants (leaves are compared elsewhere)."""
    if isinstance(one, Branch) and isinstance(other, Branch):
        if one.keys != other.keys or len(one.children) != len(other.children):
            return False
        if same_classes and (one.cls, one.spec) != (other.cls, other.spec):
            return False
        return all(same_shape(a, b, same_classes) for a, b in zip(one.children, other.children, strict=True))
    if isinstance(one, Constant) and isinstance(other, Constant):
        return same_constant(one.value, other.value)
    return type(one) is type(other)


def same_constant(a: Any, b: Any) -> bool:
    """Whether two constants are the same. A number that a trace knows only by name is none; 0.0 == −0.0, but they are
    not the same; objects without tensors are as their attributes are."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (*PLAIN, torch.memory_format, torch.layout)) or type(a) in (tuple, list, dict, set, frozenset):
        return bool(a == b) and (not isinstance(a, float | complex) or repr(a) == repr(b))
    one, other = attributes_of(a), attributes_of(b)
    return one is not None and other is not None and same_shape(flatten(one, CALL)[0], flatten(other, CALL)[0], True)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, where a copy of it is a new object of its class with the same attributes; None for
    everything else: tensors, modules, functions, containers, and objects with a way of their own to be copied."""
    if isinstance(value, torch.Tensor | type) or callable(value) or not hasattr(value, "__dict__"):
        return None
    cls = type(value)
    if getattr(cls, "__setstate__", None) is not None or cls.__getstate__ is not object.__getstate__:
        return None
    try:
        made, given, _state, *items = value.__reduce_ex__(2)
    except Exception:
        return None
    is_plain = made is copyreg.__newobj__ and given == (cls,) and not any(items)  # type: ignore[attr-defined]
    return dict(vars(value)) if is_plain and is_named(cls) else None


def is_named(cls: type) -> bool:
    """Whether a class can be found again by its name."""
    try:
        return class_named(*class_name(cls)) is cls
    except (KeyError, AttributeError):
        return False


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same tuples, lists, dicts, named tuples and slices with other leaves; everything else is a leaf."""
    cls = type(value)
    if cls in (tuple, list):
        return cls(map_leaves(part, change) for part in value)
    if cls is dict:
        return {key: map_leaves(part, change) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return cls(*(map_leaves(part, change) for part in value))
    if cls is slice:
        return slice(*(map_leaves(part, change) for part in (value.start, value.stop, value.step)))
    return change(value)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same containers with other tensors; objects of unknown classes stay as they are."""
    return map_leaves(value, lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in tuples, lists, mappings and slices."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    parts = value if isinstance(value, tuple | list) else value.values() if isinstance(value, Mapping) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def named_leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its name: `logits`, `hidden_states[3]`. Objects of any class are opened by their public
    attributes, each once; a container that is there twice has its leaves twice, whether it is one or two equal ones."""
    yield from _named_leaves(value, name, frozenset(), set())


def _named_leaves(value: Any, name: str, around: frozenset[int], opened: set[int]) -> Iterator[tuple[str, Any]]:
    is_leaf = isinstance(value, (torch.Tensor, *PLAIN))
    items = None if is_leaf else _items(value)
    parts = _public_attributes(value) if items is None and not is_leaf else items
    if parts is None:
        yield name, value
        return
    if id(value) in (opened if items is None else around):
        return
    opened.add(id(value))
    for key, part in parts:
        text = f"{name}.{key}" if name and isinstance(key, str) else f"{name}[{key}]" if name else str(key)
        yield from _named_leaves(part, text, around | {id(value)}, opened)


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def _public_attributes(value: Any) -> list[tuple[Any, Any]] | None:
    attributes = getattr(value, "__dict__", None)
    return None if callable(value) or not attributes else [(k, v) for k, v in attributes.items() if k[:1] != "_"]


def same_leaves(one: Any, other: Any) -> bool:
    """Whether two values have the same leaves under the same names, tensors bit for bit."""
    mine, its = list(named_leaves(one)), list(named_leaves(other))
    return [name for name, _ in mine] == [name for name, _ in its] and all(
        same_bits(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)
        for (_, a), (_, b) in zip(mine, its, strict=True)
    )


def copy_nested(value: Any, known: dict[int, Any] | None = None) -> Any:
    """The same with copies of its tensors, containers and plain objects. What was one object stays one; objects that
    cannot be taken apart are given as they are."""
    known = {} if known is None else known
    if isinstance(value, (*PLAIN, *SYMBOLS)):
        return value
    if id(value) not in known:
        known[id(value)] = _copied(value, known)
    return known[id(value)]


def _copied(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, tuple):
        items = [copy_nested(item, known) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        made = copy.copy(value)
        made[:] = [copy_nested(item, known) for item in value]
        return made
    if isinstance(value, dict | UserDict):
        return _copied_dict(value, known)
    attributes = attributes_of(value)
    if attributes is None:
        return value
    return new_object(*class_name(type(value)), {k: copy_nested(v, known) for k, v in attributes.items()})


def _copied_dict(value: Any, known: dict[int, Any]) -> Any:
    """A copy of a dict, or of an object that keeps one (transformers' outputs and encodings)."""
    made = copy.copy(value)
    for name, attribute in vars(made).items() if hasattr(made, "__dict__") else ():
        vars(made)[name] = copy_nested(attribute, known)
    if isinstance(made, dict):
        for key, item in value.items():
            dict.__setitem__(made, key, copy_nested(item, known))
    return made
