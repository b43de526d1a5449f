"""A transformation as plain data, and back: its class path and its settings, never code."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from refold.errors import RefoldError
from refold.signature import class_path

ENTRY_POINTS = "refold.transformations"
"""The entry-point group under which other packages list their transformation classes."""


class UnknownRecipe(RefoldError):
    """A recipe names a transformation that is not known here, or gives it settings it does not have."""


def recipe_of(transformation: Any) -> dict[str, Any] | None:
    """The class path and settings of a transformation; None if its settings are not plain data."""
    if is_dataclass(transformation) and not isinstance(transformation, type):
        settings = {f.name: getattr(transformation, f.name) for f in fields(transformation) if f.init}
    else:
        settings = {k: v for k, v in getattr(transformation, "__dict__", {}).items() if not k.startswith("_")}
    if not is_plain(settings):
        return None
    return {"class": class_path(type(transformation)), "settings": settings}


def is_plain(value: Any) -> bool:
    """Whether JSON gives a value back as it was, but for tuples, which become lists."""
    if isinstance(value, dict):
        return all(isinstance(k, str) and is_plain(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def transformation_from(recipe: dict[str, Any]) -> Any:
    """The transformation that a recipe describes. Only classes that are already known are made: those defined in what
    was imported, and those that installed packages list as entry points; a recipe never causes an import by name."""
    path, settings = recipe.get("class"), recipe.get("settings")
    cls = known_classes().get(path) if isinstance(path, str) else None
    if cls is None or not isinstance(settings, dict):
        known = ", ".join(sorted(name.rpartition(".")[2] for name in known_classes()))
        raise UnknownRecipe(
            f"the recipe needs the transformation {path!r}, which is not known here. Import the module that defines "
            f"it first, or install the package that lists it under {ENTRY_POINTS}. Known are: {known}."
        )
    try:
        inspect.signature(cls).bind(**settings)
        return cls(**{name: _as_tuples(value) for name, value in settings.items()})
    except (TypeError, ValueError) as error:
        raise UnknownRecipe(f"the recipe's settings do not fit {path}: {error}.") from None


def _as_tuples(value: Any) -> Any:
    """Lists as tuples: settings of frozen transformations are."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def known_classes() -> dict[str, type]:
    """Every concrete transformation class by its path, but for those that record nothing of their own."""
    import refold.transformations  # noqa: F401  (importing it defines every built-in one)
    from refold.transformation import Transformation, Unrecorded

    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        with contextlib.suppress(Exception, SystemExit):  # somebody else's broken package must not stop this one
            entry.load()
    root: type = Transformation
    classes: list[type] = [cls for cls in _subclasses(root) if not inspect.isabstract(cls)]
    return {class_path(cls): cls for cls in classes if not issubclass(cls, Unrecorded) and not _is_stand_in(cls)}


def _is_stand_in(cls: type) -> bool:
    return cls.__module__.startswith("refold.saving.")


def _subclasses(root: type) -> Iterator[type]:
    pending: list[type] = [root]
    seen: set[type] = set()
    while pending:
        children: list[type] = type.__subclasses__(pending.pop())
        for cls in children:
            if cls not in seen:
                seen.add(cls)
                pending.append(cls)
                yield cls
