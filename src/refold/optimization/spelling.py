"""One call in many spellings: by position, by keyword, with or without an argument that has its default anyway."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from refold.errors import UnsupportedInput
from refold.nested import same_constant

_MOST_KNOWN = 256  # spellings that are remembered


@dataclass(frozen=True)
class _Place:
    """Where an argument stands in a call: its position, or its name; or nowhere, and it has its default."""

    key: int | str | None
    default: Any = None

    def value(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.key is None:
            return self.default
        return args[self.key] if isinstance(self.key, int) else kwargs[self.key]


@dataclass(frozen=True)
class _Translation:
    """How a call in one spelling becomes one in the example's. Arguments that the example leaves out must have their
    defaults."""

    positional: tuple[_Place, ...]
    named: tuple[tuple[str, _Place], ...]
    left_out: tuple[tuple[str, _Place], ...]

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for name, place in self.left_out:
            value = place.value(args, kwargs)
            if value is not place.default and not same_constant(value, place.default):
                raise UnsupportedInput(f"It was built for calls without {name}.")
        given = tuple(place.value(args, kwargs) for place in self.positional)
        return given, {name: place.value(args, kwargs) for name, place in self.named}


class Spelling:
    """The spelling of an example, which every other call of the same arguments is brought into."""

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._signature = inspect.signature(forward)
        self._positional, self._names = len(args), tuple(kwargs)
        self._known: dict[tuple[int, tuple[str, ...]], _Translation | str] = {}
        self._own = _places(self._signature, self._positional, self._names)

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call in the example's spelling; `UnsupportedInput` says why it is another call."""
        names = tuple(kwargs)
        if len(args) == self._positional and names == self._names:
            return args, kwargs
        known = self._known.get((len(args), names))
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[len(args), names] = self._translation(len(args), names)
        if isinstance(known, str):
            raise UnsupportedInput(known)
        return known.of(args, kwargs)

    def named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call in the example's spelling, by their names."""
        given = (*args, *kwargs.values())
        keys = (*range(self._positional), *self._names)
        by_key = dict(zip(keys, given, strict=True))
        return by_key if self._own is None else {name: by_key[key] for name, key in self._own.items()}

    def _translation(self, positional: int, names: tuple[str, ...]) -> _Translation | str:
        theirs = _places(self._signature, positional, names)
        if self._own is None or theirs is None:
            own, call = (_in_words(*each) for each in ((self._positional, self._names), (positional, names)))
            return f"It was built for {own} and was called with {call}."
        found: dict[int | str, _Place] = {}
        for argument, key in self._own.items():
            place = self._place(argument, theirs)
            if place is None:
                return f"It was built for calls with {argument}."
            found[key] = place
        others = [argument for argument in theirs if argument not in self._own]
        left_out = [(argument, self._place(argument, theirs)) for argument in others]
        if any(not self._has_default(argument) for argument in others):
            return f"It was built for calls without {', '.join(others)}."
        return _Translation(
            tuple(found[i] for i in range(self._positional)),
            tuple((name, found[name]) for name in self._names),
            tuple((argument, place) for argument, place in left_out if place is not None),
        )

    def _place(self, argument: str, places: Mapping[str, int | str]) -> _Place | None:
        default = self._signature.parameters[argument].default if self._has_default(argument) else None
        if argument in places:
            return _Place(places[argument], default)
        return _Place(None, default) if self._has_default(argument) else None

    def _has_default(self, argument: str) -> bool:
        parameter = self._signature.parameters.get(argument)
        return parameter is not None and parameter.default is not parameter.empty


def _places(signature: inspect.Signature, positional: int, names: tuple[str, ...]) -> dict[str, int | str] | None:
    """Where each argument stands in a call; None where the function cannot be called so."""
    try:
        bound = signature.bind(*range(positional), **{name: name for name in names})
    except TypeError:
        return None
    places: dict[str, int | str] = {}
    for name, place in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            places |= {f"*{name}[{i}]": each for i, each in enumerate(place)}
        elif kind is inspect.Parameter.VAR_KEYWORD:
            places |= {f"**{name}[{key}]": each for key, each in place.items()}
        else:
            places[name] = place
    return places


def _in_words(positional: int, names: tuple[str, ...]) -> str:
    return " and ".join([f"{positional} positional arguments", *names])
