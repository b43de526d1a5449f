"""The API reference: every public name with its signature and docstring, read from the code.

Docstrings here are Markdown, so they are put into the page as they are instead of going through autodoc, which reads
them as reStructuredText.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from generated_text import table, write

import refold
from refold.rewrite.rule import Rewrite

GROUPS: dict[str, tuple[str, ...]] = {
    "The main job": (
        "optimize",
        "refold.optimization.optimized_module:OptimizedModule",
        "refold.report:Report",
        "train_without_padding",
        "refold.optimization.training_forward:TrainingForward",
    ),
    "Capture": (
        "trace",
        "symbolic_trace",
        "capture_report",
        "refold.capture.summary:CaptureReport",
        "captured_parts",
        "original_model",
        "unread_parameters",
    ),
    "Transformations": (
        "Transformation",
        "ReversibleTransformation",
        "compose",
        "DeepCopy",
        "LintAndRecompile",
        "explain",
        "result",
        "Result",
    ),
    "History and undo": ("history", "History", "undo", "commit", "detach", "attach"),
    "Verification and measuring": (
        "verify",
        "Verification",
        "measure",
        "refold.measurement.timing:Measurement",
        "refold.measurement.timing:measure_many",
    ),
    "Weights, checkpoints, optimizers": (
        "original_state_dict",
        "load_original_state_dict",
        "carry_optimizer",
    ),
    "Saving and loading": ("save", "load"),
}
# Modules whose names are public but not exported by `refold` itself: for people who write transformations.
MODULES = (
    "refold.rewrite",
    "refold.rewrite.editor",
    "refold.rewrite.operators",
    "refold.testing",
    "refold.extension.plugins",
    "refold.extension.pipeline_files",
    "refold.extension.torch_passes",
)


def write_api_page(path: Path) -> None:
    """Write the text that the API page includes."""
    parts = [f"## {title}\n\n{described(refold, names)}" for title, names in GROUPS.items()]
    parts += [f"## Errors\n\n{errors()}", f"## Everything else in `refold`\n\n{described(refold, rest())}"]
    grouped = [name for names in GROUPS.values() for name in names]
    documented = {id(located(refold, name)[1]) for name in (*refold.__all__, *grouped)}
    parts += [f"## {name}\n\n{module_page(importlib.import_module(name), documented)}" for name in MODULES]
    write(path, "\n\n".join(part for part in parts if not part.endswith("\n\n")) + "\n")


def described(module: ModuleType, names: tuple[str, ...]) -> str:
    """The entries of those names that the module has."""
    found = [(*located(module, name), imported(name)) for name in names]
    there = [(name, thing, how) for name, thing, how in found if thing is not None and not is_module(thing)]
    return "\n\n".join(entry(*each) for each in there)


def imported(name: str) -> str:
    """How to import what stands in a module of its own: `refold.measure`, for one, is a function as an attribute."""
    where, _, key = name.rpartition(":")
    return f"`from {where} import {key}`" if where else ""


def located(module: ModuleType, name: str) -> tuple[str, Any]:
    """The full name and the thing; a name with a colon says in which module it stands."""
    where, _, key = name.rpartition(":")
    owner = importlib.import_module(where) if where else module
    return f"{owner.__name__}.{key}", getattr(owner, key, None)


def is_module(thing: object) -> bool:
    return isinstance(thing, ModuleType)


def rest() -> tuple[str, ...]:
    """Public names that are in no group, except transformations (they have pages) and errors."""
    grouped = {name for names in GROUPS.values() for name in names}
    names = [n for n in refold.__all__ if n not in grouped and n != "__version__"]
    return tuple(n for n in names if not is_kind(getattr(refold, n), Rewrite, refold.RefoldError))


def is_kind(thing: object, *kinds: type) -> bool:
    return isinstance(thing, type) and issubclass(thing, kinds)


def errors() -> str:
    names = [n for n in refold.__all__ if is_kind(getattr(refold, n), refold.RefoldError)]
    rows = [(f"`refold.{name}`", inspect.getdoc(getattr(refold, name)) or "") for name in names]
    return table(("error", "raised when"), rows)


def module_page(module: ModuleType, documented: set[int]) -> str:
    """A module's own docstring and its public names; what has an entry already is named only."""
    names = getattr(module, "__all__", None) or [
        name
        for name, thing in vars(module).items()
        if not name.startswith("_") and getattr(thing, "__module__", None) == module.__name__ and callable(thing)
    ]
    about = inspect.getdoc(module) or ""
    elsewhere = [name for name in names if id(getattr(module, name)) in documented]
    here = [name for name in names if name not in elsewhere]
    documented.update(id(getattr(module, name)) for name in here)
    also = f"Also here, described above: {', '.join(f'`{name}`' for name in elsewhere)}." if elsewhere else ""
    return "\n\n".join(part for part in (fence_examples(about), also, described(module, tuple(here))) if part)


def fence_examples(text: str) -> str:
    """Code in a module's docstring that is not indented would become prose."""
    return re.sub(r"(?m)^((?:from|import|with) .*(?:\n.+)*)", r"```text\n\1\n```", text)


def entry(name: str, thing: Any, how: str) -> str:
    """One name as a directive of Sphinx's Python domain, with its docstring as Markdown."""
    if isinstance(thing, type):
        inner = "\n\n".join([how, docstring(thing), *(member(n, m) for n, m in members(thing))]).strip()
        made_by_users = name.startswith(MODULES)
        return f"::::{{py:class}} {name}{signature(thing) if made_by_users else ''}\n\n{inner}\n::::"
    if callable(thing):
        return f":::{{py:function}} {name}{signature(thing)}\n\n{how}\n\n{docstring(thing)}\n:::"
    return f":::{{py:data}} {name}\n\n{docstring(thing) if is_module(thing) else ''}\n:::"


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that this class documents itself."""
    for name, thing in vars(cls).items():
        plain = thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing
        if not name.startswith("_") and (inspect.isfunction(plain) or isinstance(plain, property)) and plain.__doc__:
            yield name, plain


def member(name: str, thing: Any) -> str:
    if isinstance(thing, property):
        return f":::{{py:property}} {name}\n\n{docstring(thing)}\n:::"
    return f":::{{py:method}} {name}{signature(thing, method=True)}\n\n{docstring(thing)}\n:::"


def docstring(thing: object) -> str:
    text = inspect.getdoc(thing) or ""
    generated = isinstance(thing, type) and text.startswith(f"{thing.__name__}(")  # a dataclass without a docstring
    return "" if generated else text


class Bare(str):
    """An annotation that prints without quotes."""

    __repr__ = str.__str__


def signature(thing: Any, *, method: bool = False) -> str:
    """The signature in one line, annotations as they are written."""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    parameters = list(found.parameters.values())[1 if method else 0 :]
    shown = [
        p.replace(annotation=Bare(p.annotation) if isinstance(p.annotation, str) else p.annotation) for p in parameters
    ]
    returns = found.return_annotation
    returns = (
        inspect.Signature.empty if isinstance(thing, type) else Bare(returns) if isinstance(returns, str) else returns
    )
    text = str(inspect.Signature(shown, return_annotation=returns, __validate_parameters__=False))
    return re.sub(r"<(\w+)[^>]*>", r"\1", text)
