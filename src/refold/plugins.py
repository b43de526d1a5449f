"""Every transformation by name: those of this package, and those that other packages offer through entry points.

Another package offers one in its `pyproject.toml`:

    [project.entry-points."refold.transformations"]
    FuseMyLayer = "my_package.fuse_my_layer:FuseMyLayer"

A plugin that cannot be used is reported by `problems()` and left out; it never stops anybody's work.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

import refold.transformations  # noqa: F401  (importing it defines every built-in rewrite)
from refold.errors import RefoldError
from refold.executors.base import problems as executor_problems
from refold.offered import Problem, Unusable, load_offered, origin_of
from refold.rewrite import registered
from refold.transformation import Transformation

ENTRY_POINT_GROUP = "refold.transformations"
_BUILT_IN = "refold.transformations."


class UnknownTransformation(RefoldError, KeyError):
    """No transformation has this name."""

    def __str__(self) -> str:  # KeyError would print the repr of the sentence
        return str(self.args[0]) if self.args else ""


@dataclass(frozen=True)
class Plugins:
    """What was found: classes by name, the package each comes from, and what had to be left out."""

    classes: dict[str, type[Transformation]]
    origins: dict[str, str]
    problems: tuple[Problem, ...]


def transformations() -> dict[str, type[Transformation]]:
    """Every transformation class by name, built-in ones first."""
    return find_plugins().classes


def problems() -> tuple[Problem, ...]:
    """The plugins that could not be used, each with the reason."""
    return find_plugins().problems


def transformation_named(name: str) -> type[Transformation]:
    """The class of that name; a name that does not exist is refused with the names that do."""
    found = find_plugins()
    if name in found.classes:
        return found.classes[name]
    broken = [str(problem) for problem in found.problems if problem.name == name]
    known = f"There are: {', '.join(found.classes)}."
    raise UnknownTransformation(" ".join([f"There is no transformation called {name!r}.", known, *broken]))


def name_of(transformation: Transformation) -> str:
    """The name under which a transformation's class is registered."""
    for name, cls in transformations().items():
        if cls is type(transformation):
            return name
    raise UnknownTransformation(
        f"{type(transformation).__name__} is not registered, so no file can name it. Offer it as a plugin, by an entry "
        f'point of the group "{ENTRY_POINT_GROUP}" in its package.'
    )


def find_plugins(entries: Iterable[EntryPoint] | None = None) -> Plugins:
    """The built-in transformations and those of the entry points. Where none are given, they are those of all installed
    packages, and executors that cannot be used are among the problems."""
    classes: dict[str, type[Transformation]] = _built_in()
    origins = dict.fromkeys(classes, "refold")
    left_out = [] if entries is not None else list(executor_problems())
    for entry in entry_points(group=ENTRY_POINT_GROUP) if entries is None else entries:
        cls = load_offered(entry, lambda entry: _load(entry, classes))
        if isinstance(cls, Problem):
            left_out.append(cls)
        else:
            classes[entry.name], origins[entry.name] = cls, origin_of(entry)
    return Plugins(classes, origins, tuple(left_out))


def _built_in() -> dict[str, type[Transformation]]:
    """Rewrites that this package defines; not those that a test or a user's script made in this process."""
    ours = [cls for cls in registered() if cls.__module__.startswith(_BUILT_IN)]
    return {cls.__name__: cls for cls in sorted(ours, key=lambda cls: cls.__name__)}


def _load(entry: EntryPoint, taken: dict[str, type[Transformation]]) -> type[Transformation]:
    cls = entry.load()
    if not (isinstance(cls, type) and issubclass(cls, Transformation)):
        raise Unusable(f"{entry.value} is no class derived from refold.Transformation")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise Unusable(f"{entry.value} is abstract: it lacks {missing}")
    if entry.name in taken:
        known = taken[entry.name]
        raise Unusable(f"its name is taken already, by {known.__module__}.{known.__qualname__}")
    cls()  # names in pipeline files and listings stand for transformations with default settings
    return cls
