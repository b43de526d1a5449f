"""The one list of transformation classes: those that are defined, those that have names, the one of a recipe."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from refold.entry_points import Problem, Unusable, load_offered, origin_of
from refold.errors import UnknownRecipe
from refold.rewrite.description import class_path, default_settings, from_plain
from refold.rewrite.rule import Rewrite
from refold.rewrite.transformation import Transformation

ENTRY_POINTS = "refold.transformations"
"""The entry-point group under which other packages list their transformation classes."""
_BUILT_IN = "refold.transformations."


# --- by class ------------------------------------------------------------------------------------------------------


def defined_classes() -> Iterator[type[Transformation]]:
    """Every concrete transformation class in what was imported."""
    pending: list[type[Transformation]] = [Transformation]  # type: ignore[type-abstract]
    seen = set(pending)
    while pending:
        new = [cls for cls in type.__subclasses__(pending.pop()) if cls not in seen]
        seen.update(new)
        pending += new
        yield from (cls for cls in new if not inspect.isabstract(cls))


def registered() -> Iterator[type[Rewrite]]:
    """Every concrete rewrite class, for laws and listings."""
    return (cls for cls in defined_classes() if issubclass(cls, Rewrite) and not cls.is_stand_in)


# --- by name -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plugins:
    """What was found: classes by name, the package each comes from, and what had to be left out."""

    classes: dict[str, type[Transformation]]
    origins: dict[str, str]
    problems: tuple[Problem, ...]


def find_plugins(entries: Iterable[EntryPoint] | None = None) -> Plugins:
    """The built-in transformations and those of the entry points, by default those of all installed packages. Classes
    that a test or a user's script made in this process have no name: a file that named them would mean nothing later.
    """
    ours = [cls for cls in registered() if cls.__module__.startswith(_BUILT_IN)]
    classes: dict[str, type[Transformation]] = {cls.__name__: cls for cls in sorted(ours, key=lambda cls: cls.__name__)}
    origins = dict.fromkeys(classes, "refold")
    left_out = []
    for entry in entry_points(group=ENTRY_POINTS) if entries is None else entries:
        cls = load_offered(entry, lambda entry: _load(entry, classes))
        if isinstance(cls, Problem):
            left_out.append(cls)
        else:
            classes[entry.name], origins[entry.name] = cls, origin_of(entry)
    return Plugins(classes, origins, tuple(left_out))


def _load(entry: EntryPoint, taken: dict[str, type[Transformation]]) -> type[Transformation]:
    cls = entry.load()
    if not (isinstance(cls, type) and issubclass(cls, Transformation)):
        raise Unusable(f"{entry.value} is no class derived from refold.Transformation")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise Unusable(f"{entry.value} is abstract: it lacks {missing}")
    if entry.name in taken:
        raise Unusable(f"its name is taken already, by {class_path(taken[entry.name])}")
    cls()  # names in pipeline files and listings stand for transformations with default settings
    return cls


# --- by recipe -----------------------------------------------------------------------------------------------------


def transformation_from(recipe: dict[str, Any]) -> Any:
    """The transformation that a recipe describes. Only classes that are already known are made: those defined in what
    was imported, and those that installed packages list as entry points; a recipe never causes an import by name."""
    path, settings = recipe.get("class"), recipe.get("settings")
    known = _classes_by_path()
    cls = known.get(path) if isinstance(path, str) else None
    if cls is None or not isinstance(settings, dict):
        names = ", ".join(sorted(cls.__qualname__.rpartition(".")[2] for cls in known.values()))
        raise UnknownRecipe(
            f"the recipe needs the transformation {path!r}, which is not known here. Import the module that defines "
            f"it first, or install the package that lists it under {ENTRY_POINTS}. Known are: {names}."
        )
    try:
        defaults = default_settings(cls)
        inspect.signature(cls).bind(**settings)
        return cls(**{name: from_plain(value, defaults.get(name)) for name, value in settings.items()})
    except (TypeError, ValueError) as error:
        raise UnknownRecipe(f"the recipe's settings do not fit {path}: {error}.") from None


def _classes_by_path() -> dict[str, type[Transformation]]:
    """Every class that a recipe may name: all but those that record nothing of their own."""
    find_plugins()  # imports what other packages list
    return {class_path(cls): cls for cls in defined_classes() if cls.is_recorded and not cls.is_stand_in}
