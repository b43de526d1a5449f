"""Functions from the user's own files, named as FILE.py:FUNCTION; the file is run because the user named it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refold.errors import WrongInput
from refold.wording import kind_of


def names_a_function(text: str) -> bool:
    """Whether a text has the form FILE.py:FUNCTION."""
    file, _, function = text.rpartition(":")
    return file.endswith(".py") and function.isidentifier()


def load_function(text: str, what: str) -> Callable[..., Any]:
    """The function that FILE.py:FUNCTION names."""
    if not names_a_function(text):
        raise WrongInput(f"{what} must be given as FILE.py:FUNCTION, not {text!r}.")
    file, _, name = text.rpartition(":")
    path = Path(file).resolve()
    if not path.is_file():
        raise WrongInput(f"There is no file {file}, which should hold {name}.")
    module = _run(path)
    found = getattr(module, name, None)
    if callable(found):
        return found
    if found is not None:
        raise WrongInput(f"{name} in {file} is {kind_of(found)}, and a function (or class) is needed.")
    known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    raise WrongInput(f"{file} has no function {name}. It has: {', '.join(known) or 'none'}.")


def call(function: Callable[..., Any], text: str, *args: Any) -> Any:
    """Call a user's function; what it raises becomes one sentence."""
    try:
        return function(*args)
    except (Exception, SystemExit) as error:
        raise WrongInput(f"{text} raised {type(error).__name__}: {error}") from error


def _run(path: Path) -> Any:
    """The module of a file. It may import its neighbours, as it may when Python runs it."""
    name = f"refold_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise WrongInput(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
