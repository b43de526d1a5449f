"""Frozen dataclasses as plain JSON data, and back, driven by their type hints alone."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar

from refold.errors import RefoldError

T = TypeVar("T")
Row = list[Any]


class BadReport(RefoldError, ValueError):
    """A file or a text is not a report that this version can read."""


def encode(value: Any) -> Any:
    """Plain data for `value`. A number that JSON cannot hold (nan, inf) becomes its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    return {field.name: encode_field(field, getattr(value, field.name)) for field in dataclasses.fields(value)}


def encode_field(field: dataclasses.Field[Any], value: Any) -> Any:
    return encode_table(value) if field.metadata.get("table") else encode(value)


def encode_table(records: Iterable[Any]) -> dict[str, Any]:
    """Many records of one class: the names once, then one row each, so that 20,000 nodes stay small."""
    columns: list[str] = []
    rows: list[Row] = []
    for record in records:
        columns = columns or [field.name for field in dataclasses.fields(record)]
        rows.append([encode(getattr(record, column)) for column in columns])
    return {"columns": columns, "rows": rows}


def decode(kind: Any, data: Any, where: str = "report") -> Any:
    """The inverse of `encode` for a value of type `kind`; `where` names the place in an error."""
    if type(data) is kind:
        return data  # most values are plain text: the short way first
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return decode_optional(kind, data, where)
    if origin is tuple:
        return decode_tuple(kind, data, where)
    if origin is typing.Literal:
        return decode_choice(kind, data, where)
    if dataclasses.is_dataclass(kind):
        return decode_record(typing.cast(type, kind), data, where)
    if kind is float:
        return decode_float(data, where)
    raise wrong(where, kind.__name__, data)


def decode_optional(kind: Any, data: Any, where: str) -> Any:
    if data is None:
        return None
    present = next(option for option in typing.get_args(kind) if option is not type(None))
    return decode(present, data, where)


def decode_tuple(kind: Any, data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise wrong(where, "a list", data)
    item, *rest = typing.get_args(kind)
    kinds = [item] * len(data) if rest == [Ellipsis] else [item, *rest]
    if len(kinds) != len(data):
        raise wrong(where, f"a list of {len(kinds)}", data)
    return tuple(decode(one, value, f"{where}[{i}]") for i, (one, value) in enumerate(zip(kinds, data, strict=True)))


def decode_choice(kind: Any, data: Any, where: str) -> Any:
    if data not in typing.get_args(kind):
        raise wrong(where, "one of " + ", ".join(map(repr, typing.get_args(kind))), data)
    return data


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


@cache
def type_hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def wrong(where: str, wanted: str, data: Any) -> BadReport:
    shown = repr(data) if len(repr(data)) < 60 else repr(data)[:57] + "..."
    return BadReport(f"{where} should be {wanted}, but it is {shown}. Was the file edited or cut?")
