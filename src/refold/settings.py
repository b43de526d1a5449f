"""Settings that have only a few values: said by their type, a `Literal`, and checked when a transformation is made."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

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
