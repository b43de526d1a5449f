"""The call of a model's forward: which arguments it takes, which were given, and which tensors they hold."""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from refold.errors import CaptureError
from refold.nested import (
    PLAIN,
    Branch,
    Constant,
    Leaf,
    Opaque,
    Tree,
    class_name,
    construct,
    flatten_argument,
    rebuild,
)
from refold.runtime import class_named

REQUIRED = inspect.Parameter.empty


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of the model's forward: what it was at capture, and what it is where it is not given.

    ``by_switch``: it was given by capture itself (``use_cache=False``), so callers need not give it.
    """

    name: str
    tree: Tree
    default: Any
    given: bool
    by_switch: bool = False


@dataclasses.dataclass(frozen=True)
class ForwardCall:
    """All arguments, in the order of the model's signature; `positional` says how many the model takes by position."""

    arguments: tuple[Argument, ...]
    positional: int

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments of the model's own call, with ``leaves`` as the tensors."""
        given = [a for a in self.arguments if a.given]
        places = {a.name for a in self.arguments[: self.positional]}
        args = [rebuild(a.tree, leaves) for a in given if a.name in places]
        return tuple(args), {a.name: rebuild(a.tree, leaves) for a in given if a.name not in places}

    def add_placeholders(self, graph: fx.Graph) -> list[fx.Node]:
        """The model's own arguments as placeholders, with its defaults; returns a node for every tensor."""
        nodes = [graph.placeholder(a.name, default_value=a.default) for a in self.arguments]
        found: dict[int, fx.Node] = {}
        for argument, node in zip(self.arguments, nodes, strict=True):
            found.update(_select(argument.tree, node, graph))
        return [found[i] for i in range(len(found))]

    def leaf_names(self) -> list[str]:
        """What to call each tensor in a sentence: ``input_ids``, ``pixel_values[0]``."""
        names: dict[int, str] = {}
        for argument in self.arguments:
            names.update(_leaf_names(argument.tree, argument.name))
        return [names[i] for i in range(len(names))]


def _leaf_names(tree: Tree, name: str) -> Iterator[tuple[int, str]]:
    if isinstance(tree, Leaf):
        yield tree.index, name
    for key, child in tree.items() if isinstance(tree, Branch) else ():
        yield from _leaf_names(child, f"{name}[{key!r}]")


def bind_call(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], switches: Mapping[str, Any]
) -> tuple[ForwardCall, list[Any]]:
    """How ``model(*args, **kwargs)`` is called, and the tensors in it.

    ``switches`` are values such as ``use_cache=False`` that are given to the model where its forward names them and
    the caller did not.
    """
    signature = inspect.signature(model.forward)
    added = {k: v for k, v in switches.items() if k in signature.parameters and k not in kwargs}
    kwargs = dict(kwargs) | added
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be called with these example inputs: {error}. "
            f"Its forward takes {signature}."
        ) from error
    leaves: list[Any] = []
    found: list[Argument] = []
    positional = min(len(args), len(signature.parameters))
    for parameter in signature.parameters.values():
        found.extend(_arguments_of(parameter, bound.arguments, leaves))
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            positional = max(positional, len(found))
    found = [dataclasses.replace(argument, by_switch=argument.name in added) for argument in found]
    return ForwardCall(_with_legal_defaults(found), positional), leaves


def _arguments_of(parameter: inspect.Parameter, given: Mapping[str, Any], leaves: list[Any]) -> list[Argument]:
    """The arguments of one parameter: itself, or what was given through ``*args`` and ``**kwargs``."""
    name = parameter.name
    if parameter.kind is parameter.VAR_POSITIONAL:
        return [_argument(f"{name}_{i}", v, REQUIRED, leaves) for i, v in enumerate(given.get(name, ()))]
    if parameter.kind is parameter.VAR_KEYWORD:
        return [_argument(k, v, None, leaves) for k, v in given.get(name, {}).items()]
    default = parameter.default if isinstance(parameter.default, (*PLAIN, type)) else None
    if name in given:
        return [_argument(name, given[name], default, leaves)]
    return [Argument(name, Constant(parameter.default), default, given=False)]


def _argument(name: str, value: Any, default: Any, leaves: list[Any]) -> Argument:
    if isinstance(value, torch.Tensor) and (value.is_nested or value.layout is not torch.strided):
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise CaptureError(f"The argument {name!r} is a {kind} tensor, which cannot go into a graph: give a dense one.")
    try:
        return Argument(name, flatten_argument(value, leaves, name), default, given=True)
    except Opaque as opaque:
        raise CaptureError(
            f"The argument {name!r} cannot go into a graph: {opaque}. Give tensors, plain values, or lists, tuples, "
            f"dicts and dataclasses of them; leave {name!r} out if the model works without it."
        ) from opaque


def _with_legal_defaults(arguments: list[Argument]) -> tuple[Argument, ...]:
    """Python wants no required argument after an optional one (keyword-only ones may come so): those get None."""
    optional = False
    result = []
    for argument in arguments:
        if optional and argument.default is REQUIRED:
            argument = dataclasses.replace(argument, default=None)
        optional = optional or argument.default is not REQUIRED
        result.append(argument)
    return tuple(result)


def emit(tree: Tree, leaves: Sequence[Any], graph: fx.Graph) -> Any:
    """A nested value in a graph: plain containers are written as they are, classes as a call of the class."""
    if isinstance(tree, Leaf):
        return leaves[tree.index]
    if isinstance(tree, Constant):
        is_class = isinstance(tree.value, type)
        return _call_of(graph, class_named, class_name(tree.value), {}) if is_class else tree.value
    children = [emit(child, leaves, graph) for child in tree.children]
    return construct(tree, children, lambda function, args, kwargs: _call_of(graph, function, args, kwargs))


def _call_of(graph: fx.Graph, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> fx.Node:
    node = graph.call_function(function, args, kwargs)
    # fx writes a torch.fx.wrap for this name, so that re-tracing (unpickling does it) records the call, not runs it
    node.meta["is_wrapped"] = True
    return node


def _select(tree: Tree, node: fx.Node, graph: fx.Graph) -> Iterator[tuple[int, fx.Node]]:
    """Nodes that take the tensors out of the argument ``node``: (index among the leaves, node). Those that take out
    something else are not read by any, and dropped with the graph's other unread nodes."""
    if isinstance(tree, Leaf):
        yield tree.index, node
    if not isinstance(tree, Branch):
        return
    by_name = tree.keys is not None and not issubclass(tree.cls, Mapping)
    for key, child in tree.items():
        part = graph.call_function(getattr if by_name else operator.getitem, (node, key))
        yield from _select(child, part, graph)
