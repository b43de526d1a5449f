"""Frozen dataclasses as plain JSON data, and back, driven by their type hints alone."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar

from refold.errors import BadReport

T = TypeVar("T")
type_hints = cache(typing.get_type_hints)


def encode(value: Any) -> Any:
    """Plain data for `value`. A number that JSON cannot hold (nan, inf) becomes its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    return {
        field.name: (encode_table if field.metadata.get("table") else encode)(getattr(value, field.name))
        for field in dataclasses.fields(value)
    }


def encode_table(records: Sequence[Any]) -> dict[str, Any]:
    """Many records of one class: the names once, then one row each, so that 20,000 nodes stay small."""
    columns = [field.name for field in dataclasses.fields(records[0])] if records else []
    return {"columns": columns, "rows": [[encode(getattr(record, column)) for column in columns] for record in records]}


def decode(kind: Any, data: Any, where: str = "report") -> Any:
    """The inverse of `encode` for a value of type `kind`; `where` names the place in an error."""
    if type(data) is kind:
        return data  # most values are plain text: the short way first
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):  # something, or None
        return None if data is None else decode(typing.get_args(kind)[0], data, where)
    if origin is tuple:
        return decode_tuple(kind, data, where)
    if origin is typing.Literal:
        if data in typing.get_args(kind):
            return data
        raise wrong(where, "one of " + ", ".join(map(repr, typing.get_args(kind))), data)
    if dataclasses.is_dataclass(kind):
        return decode_record(typing.cast(type, kind), data, where)
    if kind is float:
        return decode_float(data, where)
    raise wrong(where, kind.__name__, data)


def decode_tuple(kind: Any, data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise wrong(where, "a list", data)
    item, *rest = typing.get_args(kind)
    kinds = [item] * len(data) if rest == [Ellipsis] else [item, *rest]
    if len(kinds) != len(data):
        raise wrong(where, f"a list of {len(kinds)}", data)
    return tuple(decode(one, value, f"{where}[{i}]") for i, (one, value) in enumerate(zip(kinds, data, strict=True)))


def decode_float(data: Any, where: str) -> float:
    if isinstance(data, str) and data in ("nan", "inf", "-inf"):
        return float(data)
    if isinstance(data, bool) or not isinstance(data, int | float):
        raise wrong(where, "a number", data)
    return float(data)


def decode_record(kind: type[T], data: Any, where: str) -> T:
    if not isinstance(data, dict):
        raise wrong(where, "an object", data)
    hints = type_hints(typing.cast(typing.Hashable, kind))
    values = {}
    for field in dataclasses.fields(typing.cast(Any, kind)):
        if field.name not in data:
            continue  # a field that a later version of the same schema added: its default stands
        place = f"{where}.{field.name}"
        reader = decode_table if field.metadata.get("table") else decode
        values[field.name] = reader(hints[field.name], data[field.name], place)
    try:
        return kind(**values)
    except TypeError as error:
        raise BadReport(f"{where} cannot be read as a {kind.__name__}: {error}. Was the file edited or cut?") from error


def decode_table(kind: Any, data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, dict) or not {"columns", "rows"} <= data.keys():
        raise wrong(where, "a table of columns and rows", data)
    record = typing.get_args(kind)[0]
    columns = data["columns"]
    return tuple(
        decode_record(record, dict(zip(columns, row, strict=False)), f"{where}[{i}]")
        for i, row in enumerate(data["rows"])
    )


def wrong(where: str, wanted: str, data: Any) -> BadReport:
    shown = repr(data) if len(repr(data)) < 60 else repr(data)[:57] + "..."
    return BadReport(f"{where} should be {wanted}, but it is {shown}. Was the file edited or cut?")
