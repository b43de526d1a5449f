"""Methods of a model that call the model: they run the fast way. Others that compute by its layers run as they are.

A method such as `predict` that calls `self(x)` is run with the optimized model as its `self`, unless it, or a method
that it calls, sets an attribute: that would give the fast way up. What a method does is read from its source.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn

_SEVERAL_CALLS = {
    "generate": "it goes from token to token with a cache of its own, and single calls are what is prepared"
}
"""What libraries call the methods that reach the model in ways that no source shows."""
_OF_TORCH = ("torch.", "refold.")  # `train`, `apply` and their like have nothing to do with calls


@dataclass(frozen=True)
class Method:
    """What a method does with its model."""

    calls_model: bool = False
    sets: str | None = None
    """An attribute of the model that it sets or deletes."""
    runs: tuple[str, ...] = ()
    """The attributes of the model that it calls and that are no methods: layers, most often."""


def bound_to(fast: nn.Module, original: nn.Module, name: str, say: Callable[[str], None]) -> Any:
    """An attribute of the original as callers of the optimized model get it. `say` is told when a method is called that
    runs at the original's speed."""
    value = getattr(original, name)
    function = getattr(value, "__func__", None)
    if function is None or value.__self__ is not original or name.startswith("__"):
        return value
    if name in _SEVERAL_CALLS:
        return _said(value, f"{name} runs at the speed of the original: {_SEVERAL_CALLS[name]}", say)
    method = method_of(type(original), name)  # type: ignore[arg-type]
    if method.calls_model and method.sets is None:
        return function.__get__(fast)
    layer = next((each for each in method.runs if isinstance(getattr(original, each, None), nn.Module)), None)
    if not (method.calls_model or layer):
        return value
    why = f"sets {method.sets}" if method.calls_model else f"runs {layer} by itself"
    why += "; only calls of the model run the fast way"
    return _said(value, f"{name} runs at the speed of the original: it {why}", say)


def _said(method: Callable[..., Any], sentence: str, say: Callable[[str], None]) -> Callable[..., Any]:
    """The method, which tells its callers."""

    @functools.wraps(method)
    def as_it_is(*args: Any, **kwargs: Any) -> Any:
        say(sentence)
        return method(*args, **kwargs)

    return as_it_is


@functools.lru_cache(maxsize=1024)
def method_of(owner: type, name: str) -> Method:
    """What a method of a class does, with the methods of the model that it calls."""
    calls_model, sets, runs = False, None, []
    waiting, known = [name], {name}
    while waiting:
        at = waiting.pop()
        for what, attribute in _uses(owner, at):
            function = inspect.getattr_static(owner, attribute, None)
            is_method = isinstance(function, FunctionType)
            calls_model |= what == "call" and attribute in ("", "forward", "__call__")
            sets = sets or (attribute if what == "set" else None)
            runs += [attribute] if what == "call" and attribute and function is None else []
            if what == "call" and is_method and attribute not in known and attribute != "forward":
                known.add(attribute)
                waiting.append(attribute)
    return Method(calls_model, sets, tuple(runs))


@functools.lru_cache(maxsize=4096)
def _uses(owner: type, name: str) -> tuple[tuple[str, str], ...]:
    """What a method does with its first argument: ("call", attribute), where the attribute of the model itself is "",
    and ("set", attribute). Those of base classes count too, since it may call them."""
    functions = [found for base in owner.__mro__ if isinstance(found := vars(base).get(name), FunctionType)]
    return tuple(use for function in functions for use in _uses_of(inspect.unwrap(function)))


def _uses_of(function: Callable[..., Any]) -> list[tuple[str, str]]:
    if str(function.__module__).startswith(_OF_TORCH):
        return []
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return []
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or not definition.args.args:
        return []
    return list(_uses_in(definition, definition.args.args[0].arg))


def _uses_in(definition: ast.FunctionDef, model: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and (name := _attribute(node.func, model)) is not None:
            yield "call", name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            name = _attribute(node, model)
            if name:
                yield "set", name


def _attribute(node: ast.AST, model: str) -> str | None:
    """The name of an attribute of the model; "" for the model itself, None for anything else."""
    if isinstance(node, ast.Name) and node.id == model:
        return ""
    is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == model
    return node.attr if is_attribute else None  # type: ignore[attr-defined]
