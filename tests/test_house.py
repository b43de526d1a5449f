"""The sources stay a tree one can hold in mind: few files at the root, names that mean one thing, short rules."""

from __future__ import annotations

import ast
import functools
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import refold

SOURCES = Path(refold.__file__).parent
FILES = sorted(SOURCES.rglob("*.py"))
RULES = [path for path in FILES if path.parent.name == "transformations" and path.name != "__init__.py"]
LONGEST_FUNCTION = 40


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef))


def body_lines(function: ast.FunctionDef) -> int:
    """The lines of a function without its docstring: what is explained may be long."""
    docstring = function.body[0] if ast.get_docstring(function) is not None else None
    explained = 0 if docstring is None else (docstring.end_lineno or 0) - docstring.lineno + 1
    return (function.end_lineno or 0) - function.lineno + 1 - explained


def test_few_files_lie_at_the_root() -> None:
    assert len(list(SOURCES.glob("*.py"))) <= 12


def test_no_two_files_have_one_name() -> None:
    names = Counter(path.name for path in FILES if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_no_module_has_the_name_of_a_public_function() -> None:
    modules = {path.stem for path in FILES} | {path.name for path in SOURCES.rglob("*") if path.is_dir()}
    assert modules.isdisjoint(name for name in refold.__all__ if name != "__version__")


def test_rules_are_read_in_a_minute() -> None:
    lengths = {path.name: lines(path) for path in RULES}
    assert statistics.median(lengths.values()) <= 85
    assert {name: length for name, length in lengths.items() if length > 160} == {}


def test_functions_are_short() -> None:
    lengths = {(path, function): body_lines(function) for path in FILES for function in functions(path)}
    long = {
        f"{path.relative_to(SOURCES)}:{function.name}": length
        for (path, function), length in lengths.items()
        if length > LONGEST_FUNCTION
    }
    assert long == {}


def test_every_file_says_its_idea_in_its_first_line() -> None:
    silent = [path for path in FILES if ast.get_docstring(parsed(path)) is None]
    assert [str(path.relative_to(SOURCES)) for path in silent if path.name not in ("__main__.py", "_version.py")] == []
