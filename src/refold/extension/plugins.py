"""Every transformation by name: those of this package, and those that other packages offer through entry points.

Another package offers one in its `pyproject.toml`:

    [project.entry-points."refold.transformations"]
    FuseMyLayer = "my_package.fuse_my_layer:FuseMyLayer"

A plugin that cannot be used is reported by `problems()` and left out; it never stops a command.
"""

from __future__ import annotations

from refold.entry_points import Problem
from refold.errors import UnknownTransformation
from refold.executors.catalogue import problems as executor_problems
from refold.rewrite.registry import ENTRY_POINTS, find_plugins
from refold.rewrite.transformation import Transformation


def transformations() -> dict[str, type[Transformation]]:
    """Every transformation class by name, built-in ones first."""
    return find_plugins().classes


def problems() -> tuple[Problem, ...]:
    """The plugins that could not be used, executors first, each with the reason."""
    return (*executor_problems(), *find_plugins().problems)


def transformation_named(name: str) -> type[Transformation]:
    """The class of that name; a name that does not exist is refused with the names that do."""
    found = find_plugins()
    if name in found.classes:
        return found.classes[name]
    broken = [str(problem) for problem in problems() if problem.name == name]
    known = f"There are: {', '.join(found.classes)}."
    raise UnknownTransformation(" ".join([f"There is no transformation called {name!r}.", known, *broken]))


def name_of(transformation: Transformation) -> str:
    """The name under which a transformation's class is registered."""
    for name, cls in transformations().items():
        if cls is type(transformation):
            return name
    raise UnknownTransformation(
        f"{type(transformation).__name__} is not registered, so no file can name it. Offer it as a plugin, by an entry "
        f'point of the group "{ENTRY_POINTS}" in its package.'
    )
