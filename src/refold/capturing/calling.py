"""A model's own way of being called: which arguments it takes, which were given, and which tensors they hold."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from refold.capturing.errors import CaptureError
from refold.capturing.trees import PLAIN, Constant, Leaf, Opaque, Tree, emit, flatten, holds_tensors, rebuild, select

REQUIRED = inspect.Parameter.empty


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of the model's forward: what it was at capture, and what it is where nobody gives it.

    ``by_switch``: it was given by capture itself (``use_cache=False``), so nobody needs to give it again.
    """

    name: str
    tree: Tree
    default: Any
    given: bool
    by_switch: bool = False

    def is_as_captured(self, value: Any) -> bool:
        """Whether a value that is no tensor is what is written into the graph."""
        if not isinstance(self.tree, Constant):
            return False
        left_out = value is self.default and (self.by_switch or not self.given)
        return left_out or value is self.tree.value

    @property
    def holds_tensors(self) -> bool:
        return holds_tensors(self.tree)


@dataclasses.dataclass(frozen=True)
class Calling:
    """All arguments, in the order of the model's signature; `positional` says how many the model takes by place."""

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
            found.update(select(argument.tree, node, graph))
        return [found[i] for i in range(len(found))]

    def leaf_names(self) -> list[str]:
        """What to call each tensor in a sentence: ``input_ids``, ``pixel_values[0]``."""
        names: dict[int, str] = {}
        for argument in self.arguments:
            names.update(_leaf_names(argument.tree, argument.name))
        return [names[i] for i in range(len(names))]


def _leaf_names(tree: Tree, name: str) -> dict[int, str]:
    if isinstance(tree, Leaf):
        return {tree.index: name}
    if isinstance(tree, Constant):
        return {}
    found: dict[int, str] = {}
    for key, child in zip(tree.keys or range(len(tree.children)), tree.children, strict=True):
        found.update(_leaf_names(child, f"{name}[{key!r}]"))
    return found


def bind(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], switches: Mapping[str, Any]
) -> tuple[Calling, list[Any]]:
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
    return Calling(_with_legal_defaults(found), positional), leaves


def _arguments_of(parameter: inspect.Parameter, given: Mapping[str, Any], leaves: list[Any]) -> list[Argument]:
    """The arguments one parameter stands for: itself, or what was given through ``*args`` and ``**kwargs``."""
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
        return Argument(name, flatten(value, leaves, name), default, given=True)
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


def add_output(graph: fx.Graph, tree: Tree, leaves: Sequence[Any]) -> None:
    """The output node: the model's own output type, built from the graph's values."""
    graph.output(emit(tree, leaves, graph))
