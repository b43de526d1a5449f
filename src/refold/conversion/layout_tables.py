"""Layouts as tables: which names of a checkpoint join, split, move their axes or are padded, row by row, in YAML.

    refold-layout: 1
    rows:
      - from: ["{p*}.q_proj.{kind=weight|bias}", "{p*}.k_proj.{kind}", "{p*}.v_proj.{kind}"]
        into: "{p*}.qkv_proj.{kind}"
        shares: [num_attention_heads, num_key_value_heads, num_key_value_heads]

`{x}` stands for one part of a dotted name, `{x*}` for any number of them, `{x=a|b}` for one of these words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from refold.errors import BadLayout
from refold.extension.pipeline_files import yaml_data
from refold.weights import Operation, Pad, Permute, Reshape, Transpose

KEY = "refold-layout"
VERSION = 1
PLAIN = "hf"
"""The layout of transformers: what every table says how to come from."""
_BUILT_IN = Path(__file__).parent / "layouts"
_PLACEHOLDER = re.compile(r"\{([^\W\d]\w*)(\*?)(?:=([\w|]+))?\}")
_KEYS = {"from", "into", "along", "shares", "stack", "steps"}
_STEPS = "transpose, {permute: [1, 0, 2]}, {reshape: [num_heads, -1]} or {pad: {along: 0, multiple: 64}}"
Shares = tuple[int | str, ...]


@dataclass(frozen=True)
class Step:
    """What is done to one tensor: `transpose`, `permute`, `reshape` or `pad`, with its numbers."""

    verb: str
    numbers: Shares = ()

    def operation(self, shape: tuple[int, ...], config: Mapping[str, Any]) -> Operation:
        """The weight map for a tensor of this shape."""
        if self.verb == "transpose" and len(shape) < 2:
            raise BadLayout(f"a tensor of shape {list(shape)} has no two axes that the step transpose could swap.")
        if self.verb == "transpose":
            return Transpose()
        numbers = tuple(number_of(value, config) for value in self.numbers)
        if self.verb == "permute" and len(numbers) != len(shape):
            raise BadLayout(f"a tensor of shape {list(shape)} has not the axes {list(numbers)} of the step permute.")
        if self.verb == "permute":
            return Permute(numbers)
        if self.verb == "reshape":
            return Reshape(shape, _sizes(shape, numbers))
        along, multiple = numbers
        if along >= len(shape) or multiple < 1:
            raise BadLayout(
                f"a tensor of shape {list(shape)} cannot be padded along {along} to multiples of {multiple}."
            )
        return Pad(-shape[along] % multiple, along)

    def inverted(self) -> Step:
        """The step back, where the sizes of the tensor alone say it."""
        if self.verb == "permute":
            places = {axis: place for place, axis in enumerate(self.numbers)}
            return replace(self, numbers=tuple(places[axis] for axis in range(len(places))))
        if self.verb == "transpose":
            return self
        raise BadLayout(
            f"a row has the step {self.verb}, whose way back is known only for a folder that refold convert wrote."
        )


@dataclass(frozen=True)
class Row:
    """Some tensors (`parts`) that are one (`whole`) in the other layout; `joins` says which side is there now."""

    parts: tuple[str, ...]
    whole: str
    joins: bool
    along: int = 0
    shares: Shares = ()
    stack: str = ""
    """The placeholder that counts 0, 1, 2, …: tensors of all its numbers become one with a further first axis."""
    steps: tuple[Step, ...] = ()
    """Done to the whole, in this order: after joining, or before splitting."""
    words: dict[str, str] = field(default_factory=dict)
    """What each placeholder stands for, as a regular expression."""

    @property
    def taken(self) -> tuple[str, ...]:
        """The patterns of the names that this row explains."""
        return self.parts if self.joins else (self.whole,)

    def __str__(self) -> str:
        parts = ", ".join(self.parts)
        return f"{parts} -> {self.whole}" if self.joins else f"{self.whole} -> {parts}"

    def inverted(self) -> Row:
        """The row that reads what this one writes."""
        return replace(self, joins=not self.joins, steps=tuple(step.inverted() for step in reversed(self.steps)))

    def named(self, pattern: str, words: Mapping[str, str]) -> str:
        """A name: a pattern with its placeholders filled in."""
        return _PLACEHOLDER.sub(lambda match: words[match[1]], pattern)

    def expression(self, pattern: str) -> re.Pattern[str]:
        """What matches the names of a pattern."""
        text, place, seen = "", 0, set()
        for match in _PLACEHOLDER.finditer(pattern):
            name = match[1]
            found = f"(?P={name})" if name in seen else f"(?P<{name}>{self.words[name]})"
            text, place = text + re.escape(pattern[place : match.start()]) + found, match.end()
            seen.add(name)
        return re.compile(text + re.escape(pattern[place:]))


@dataclass(frozen=True)
class Layout:
    """A table of rows, each of which says how tensors of the layout of transformers lie in this one."""

    name: str
    rows: tuple[Row, ...] = ()

    def inverted(self) -> Layout:
        """The table of the way back to the layout of transformers."""
        return Layout(PLAIN, tuple(row.inverted() for row in self.rows))


def layout_named(name: str) -> Layout:
    """A layout that Refold has, or the one in a YAML file."""
    if name == PLAIN:
        return Layout(PLAIN)
    known = {path.stem: path for path in sorted(_BUILT_IN.glob("*.yaml"))}
    path = known.get(name, Path(name))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        names = ", ".join([PLAIN, *known])
        raise BadLayout(f"The layout {name} cannot be read: {reason}. Known are {names}, or give a file.") from None
    return layout_from_text(text, name if name in known else path.stem, str(path))


def layout_from_text(text: str, name: str, origin: str) -> Layout:
    """The layout that a YAML text states; `origin` says in errors where the text comes from."""
    data = yaml_data(text, origin, BadLayout)
    if not isinstance(data, dict) or data.get(KEY) is not VERSION or set(data) - {KEY, "rows"}:
        raise BadLayout(f'{origin} is no layout that this Refold reads: it must hold "{KEY}: {VERSION}" and "rows".')
    rows = data.get("rows")
    if not isinstance(rows, list):
        raise BadLayout(f'{origin} needs a list under "rows".')
    return Layout(name, tuple(_row(row, f"{origin}, row {i}") for i, row in enumerate(rows, 1)))


def number_of(value: int | str, config: Mapping[str, Any]) -> int:
    """A number of a table: itself, or what config.json says of one of these keys."""
    if isinstance(value, int):
        return value
    inner = config.get("text_config")
    for key in value.split("|"):
        for place in (config, inner if isinstance(inner, dict) else {}):
            if type(place.get(key)) is int:
                return int(place[key])
    raise BadLayout(f"the table needs {value.replace('|', ' or ')}, and config.json has no such number.")


def _sizes(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    import torch

    try:
        return tuple(torch.empty(shape, device="meta").reshape(sizes).shape)
    except (RuntimeError, TypeError, OverflowError):
        raise BadLayout(f"a tensor of shape {list(shape)} has no shape {list(sizes)}.") from None


# --- reading -------------------------------------------------------------------------------------------------------


def _row(data: Any, where: str) -> Row:
    if not isinstance(data, dict) or not {"from", "into"} <= set(data) or set(data) - _KEYS:
        raise BadLayout(f"{where} must have from and into, and may have along, shares, stack and steps.")
    sides = [_patterns(data[key], f"{where}, {key}") for key in ("from", "into")]
    joins = len(sides[1]) == 1
    parts, whole = (sides[0], sides[1]) if joins else (sides[1], sides[0])
    if len(whole) > 1:
        raise BadLayout(f"{where} has several names on both sides: write a row for each that joins or splits.")
    stack, along = data.get("stack", ""), data.get("along", 0)
    shares = tuple(_plain_number(value, f"{where}, shares") for value in _listed(data.get("shares", []), where))
    steps = tuple(_step(step, f"{where}, steps") for step in _listed(data.get("steps", []), where))
    if not isinstance(stack, str):
        raise BadLayout(f"{where}: stack must name one placeholder, such as n.")
    if type(along) is not int or along < 0 or (stack and along):
        raise BadLayout(f"{where}: along must be the number of an axis, and 0 where numbers are stacked.")
    if shares and len(shares) != len(parts):
        raise BadLayout(f"{where}: shares must have one number for each of the {len(parts)} names that join.")
    if not joins and not shares:
        raise BadLayout(f"{where} splits a tensor and needs shares, such as [1, 1].")
    row = Row(parts, whole[0], joins, along, shares, stack, steps)
    return replace(row, words=_words(row, where))


def _words(row: Row, where: str) -> dict[str, str]:
    """What each placeholder of a row stands for; said where it stands first."""
    words: dict[str, str] = {}
    seen: dict[str, set[str]] = {}
    for pattern in (*row.parts, row.whole):
        for name, star, choices in _PLACEHOLDER.findall(pattern):
            seen.setdefault(name, set()).add(pattern)
            if name not in words or star or choices:
                words[name] = choices or (".+" if star else r"[^.]+")
        if re.sub(_PLACEHOLDER, "", pattern).strip("{}") != re.sub(_PLACEHOLDER, "", pattern):
            raise BadLayout(f"{where}: {pattern!r} has braces that are no placeholder such as {{p*}} or {{k=a|b}}.")
    sides = [{n for p in side for n, _, _ in _PLACEHOLDER.findall(p)} for side in (row.parts, (row.whole,))]
    if sides[0] - sides[1] != ({row.stack} if row.stack else set()) or sides[1] - sides[0]:
        raise BadLayout(f"{where}: both sides need the same placeholders; stack names the one that is counted.")
    each = [{n for n, _, _ in _PLACEHOLDER.findall(p)} for p in row.parts]
    if any(names != each[0] for names in each):
        raise BadLayout(f"{where}: all names that join need the same placeholders.")
    if row.stack:
        words[row.stack] = "0|[1-9][0-9]*"
    return words


def _patterns(value: Any, where: str) -> tuple[str, ...]:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise BadLayout(f"{where} must be a name, or a list of different names.")
    return tuple(names)


def _listed(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadLayout(f"{where}: shares and steps must be lists.")
    return value


def _plain_number(value: Any, where: str) -> int | str:
    if type(value) is int or (isinstance(value, str) and value):
        return value
    raise BadLayout(f"{where}: {value!r} is neither a number nor a key of config.json.")


def _step(data: Any, where: str) -> Step:
    match data:
        case "transpose":
            return Step("transpose")
        case {"permute": [*axes]} if len(data) == 1 and {*map(repr, axes)} == {*map(repr, range(len(axes)))}:
            return Step("permute", tuple(axes))
        case {"reshape": [*sizes]} if len(data) == 1:
            return Step("reshape", tuple(_plain_number(size, where) for size in sizes))
        case {"pad": {"along": int(along), "multiple": multiple}} if len(data) == 1 and along >= 0:
            return Step("pad", (along, _plain_number(multiple, where)))
    raise BadLayout(f"{where}: {data!r} is no step; there are {_STEPS}.")
