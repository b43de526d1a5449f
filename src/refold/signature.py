"""A stable digest of a transformation: its class and its settings, the same in any process and under any hash seed."""

from __future__ import annotations

import enum
import functools
import hashlib
import types
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from refold.fingerprint import fingerprint


def digest(thing: Any) -> int:
    """A 63-bit number made from the class path and the settings of a thing."""
    words = spell(thing, ())
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") >> 1


def spell(value: Any, seen: tuple[int, ...]) -> str:
    """A text that is equal for equal values and holds no address, no hash and no order of a set."""
    if id(value) in seen:
        return f"cycle {len(seen) - seen.index(id(value))}"
    inner = (*seen, id(value))
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}[{','.join(spell(v, inner) for v in value)}]"
    if isinstance(value, set | frozenset):
        return f"set{{{','.join(sorted(spell(v, inner) for v in value))}}}"
    if isinstance(value, dict):
        return f"dict{{{','.join(sorted(f'{spell(k, inner)}={spell(v, inner)}' for k, v in value.items()))}}}"
    return _spell_object(value, inner)


def _spell_object(value: Any, seen: tuple[int, ...]) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor:{fingerprint(value)}"
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.Size | enum.Enum):
        return f"{type(value).__name__}:{value}"
    if isinstance(value, type):
        return f"class:{class_path(value)}"
    if isinstance(value, functools.partial):
        return f"partial({spell((value.func, value.args, value.keywords), seen)})"
    if isinstance(value, types.FunctionType):
        return _spell_function(value, seen)
    if isinstance(value, types.CodeType):
        return _spell_code(value, seen)
    if isinstance(value, types.MethodType):
        return f"method:{value.__func__.__qualname__}({spell(value.__self__, seen)})"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"function:{getattr(value, '__module__', '')}.{value.__qualname__}"
    if is_dataclass(value) and not isinstance(value, type):
        settings = {f.name: getattr(value, f.name) for f in fields(value)}
    else:
        settings = _settings(value)
    return f"{class_path(type(value))}({spell(settings, seen)})"


def _spell_function(function: types.FunctionType, seen: tuple[int, ...]) -> str:
    """Two lambdas of one name differ in their code, in what they close over and in their defaults."""
    closed = [cell.cell_contents for cell in function.__closure__ or ()]
    parts = spell((function.__code__, closed, function.__defaults__, function.__kwdefaults__), seen)
    return f"function:{function.__module__}.{function.__qualname__}({parts})"


def _spell_code(code: types.CodeType, seen: tuple[int, ...]) -> str:
    """What a function does, those that it defines inside included; not where it was written."""
    body = hashlib.sha256(code.co_code + code.co_exceptiontable).hexdigest()[:16]
    kinds = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return f"code:{body}({spell((code.co_consts, kinds, names), seen)})"


def _settings(value: Any) -> dict[str, Any]:
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if hasattr(value, name)]
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots if name != "__dict__"}}


def class_path(cls: type) -> str:
    """Where a class is defined."""
    return f"{cls.__module__}.{cls.__qualname__}"
