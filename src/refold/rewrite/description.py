"""A transformation as plain data: its signature, its settings, and the recipe from which it can be made again."""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import types
from dataclasses import MISSING, field, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from refold.fingerprint import fingerprint
from refold.wording import kind_of


def signature_of(thing: Any) -> int:
    """A 63-bit number made from the class path and the settings of a thing: the same in any process, under any hash
    seed."""
    words = canonical_text(thing)
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") >> 1


def canonical_text(value: Any, seen: tuple[int, ...] = ()) -> str:
    """A text that is equal for equal values and holds no address, no hash and no order of a set."""
    if id(value) in seen:
        return f"cycle {len(seen) - seen.index(id(value))}"
    inner = (*seen, id(value))
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}[{','.join(canonical_text(v, inner) for v in value)}]"
    if isinstance(value, set | frozenset):
        return f"set{{{','.join(sorted(canonical_text(v, inner) for v in value))}}}"
    if isinstance(value, dict):
        items = sorted(f"{canonical_text(k, inner)}={canonical_text(v, inner)}" for k, v in value.items())
        return f"dict{{{','.join(items)}}}"
    return _object_text(value, inner)


def _object_text(value: Any, seen: tuple[int, ...]) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor:{fingerprint(value)}"
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.Size | enum.Enum):
        return f"{type(value).__name__}:{value}"
    if isinstance(value, type):
        return f"class:{class_path(value)}"
    if isinstance(value, functools.partial):
        return f"partial({canonical_text((value.func, value.args, value.keywords), seen)})"
    if isinstance(value, types.FunctionType):
        return _function_text(value, seen)
    if isinstance(value, types.CodeType):
        return _code_text(value, seen)
    if isinstance(value, types.MethodType):
        return f"method:{value.__func__.__qualname__}({canonical_text(value.__self__, seen)})"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"function:{getattr(value, '__module__', '')}.{value.__qualname__}"
    if is_dataclass(value) and not isinstance(value, type):
        unset = unset_additions(value)
        settings = {f.name: getattr(value, f.name) for f in fields(value) if f.name not in unset}
    else:
        settings = _attributes(value)
    return f"{class_path(type(value))}({canonical_text(settings, seen)})"


def _function_text(function: types.FunctionType, seen: tuple[int, ...]) -> str:
    """Two lambdas of one name differ in their code, in what they close over and in their defaults."""
    closed = [cell.cell_contents for cell in function.__closure__ or ()]
    parts = canonical_text((function.__code__, closed, function.__defaults__, function.__kwdefaults__), seen)
    return f"function:{function.__module__}.{function.__qualname__}({parts})"


def _code_text(code: types.CodeType, seen: tuple[int, ...]) -> str:
    """What a function does, those that it defines inside included; not where it was written."""
    body = hashlib.sha256(code.co_code + code.co_exceptiontable).hexdigest()[:16]
    kinds = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return f"code:{body}({canonical_text((code.co_consts, kinds, names), seen)})"


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if hasattr(value, name)]
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots if name != "__dict__"}}


def class_path(cls: type) -> str:
    """Where a class is defined."""
    return f"{cls.__module__}.{cls.__qualname__}"


def added_setting(default: Any) -> Any:
    """A setting that a class got later: while it has its default, signature and text are those of before, by which
    changes that were stored then are found."""
    return field(default=default, metadata={"added": True})


def unset_additions(thing: object) -> set[str]:
    """The settings that a dataclass got later and that have their defaults."""
    known = fields(thing) if is_dataclass(thing) else ()
    return {f.name for f in known if f.metadata.get("added") and getattr(thing, f.name) == f.default}


Keep = Literal["correction", "original"]
"""What a fold keeps of the weights that it replaces: a correction of a few per cent of their bytes, or the weights."""


def check_settings(thing: object) -> None:
    """Raise if a dataclass has a setting that is none of the values of its type."""
    for name, values in _closed_settings(type(thing)).items():
        value = getattr(thing, name)
        if value not in values:
            raise ValueError(f"{name} must be {' or '.join(map(repr, values))}, not {value!r}")


def _closed_settings(cls: type) -> dict[str, tuple[Any, ...]]:
    try:
        kinds = get_type_hints(cls) if is_dataclass(cls) else {}
    except (NameError, TypeError):  # types that are known to type checkers only
        return {}
    names = [f.name for f in fields(cls)] if kinds else []
    return {name: get_args(kinds[name]) for name in names if get_origin(kinds[name]) is Literal}


# --- settings as plain data ----------------------------------------------------------------------------------------


class NotPlain(TypeError):
    """A setting that no file can hold."""


def recipe_of(transformation: Any) -> dict[str, Any] | None:
    """The class path and settings of a transformation; None if its settings are not plain data."""
    try:
        settings = to_plain(settings_of(transformation))
    except NotPlain:
        return None
    return {"class": class_path(type(transformation)), "settings": settings}


def settings_of(transformation: Any) -> dict[str, Any]:
    """The settings of a transformation by name."""
    if is_dataclass(transformation):
        return {f.name: getattr(transformation, f.name) for f in fields(transformation) if f.init}
    return {k: v for k, v in getattr(transformation, "__dict__", {}).items() if not k.startswith("_")}


def default_settings(cls: type) -> dict[str, Any]:
    """The settings that a class takes, each with its default value (`inspect.Parameter.empty` where it has none)."""
    parameters = inspect.signature(cls).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for f in fields(cls) if is_dataclass(cls) else ():
        if f.default_factory is not MISSING and f.name in defaults:
            defaults[f.name] = f.default_factory()
    return defaults


def listed_settings(cls: type) -> dict[str, Any]:
    """The settings of a class with their default values as plain data, for listings; what is not plain, as text."""
    return {name: _listed(default) for name, default in default_settings(cls).items()}


def _listed(value: Any) -> Any:
    try:
        return to_plain(value)
    except NotPlain:
        return repr(value)


def to_plain(value: Any) -> Any:
    """A setting as JSON and YAML can hold it: a dtype and a member of an enum by name, a tuple as a list."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: to_plain(v) for key, v in value.items()}
    raise NotPlain(f"is {kind_of(value)}, which no file can hold")


def from_plain(value: Any, default: Any) -> Any:
    """A setting from plain data: a list becomes a tuple, and a name a dtype or a member of an enum, where the default
    value is one."""
    if isinstance(value, list):
        inner = default[0] if isinstance(default, tuple | list) and default else None
        items = [from_plain(v, inner) for v in value]
        return items if isinstance(default, list) else tuple(items)
    if isinstance(value, str) and isinstance(default, torch.dtype):
        found = getattr(torch, value.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"must be a dtype such as float16, not {value!r}")
        return found
    if isinstance(value, str) and isinstance(default, enum.Enum):
        members = type(default).__members__
        if value not in members:
            raise ValueError(f"must be one of {', '.join(members)}, not {value!r}")
        return members[value]
    return value


def is_plain(value: Any) -> bool:
    """Whether JSON gives a value back as it was, but for tuples, which become lists."""
    if isinstance(value, dict):
        return all(isinstance(k, str) and is_plain(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
