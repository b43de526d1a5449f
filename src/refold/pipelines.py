"""Pipelines as files: transformations in order, by name, with plain settings, in YAML.

    refold-pipeline: 1
    transformations:
      - RemoveNoOps
      - FoldBatchNorm: {keep: original}

Names are looked up among the registered transformations and nowhere else, and settings are plain values, so reading
somebody's pipeline runs none of their code.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from refold.errors import RefoldError
from refold.plugins import name_of, transformation_named
from refold.transformation import Composition, Transformation, check_transformation

KEY = "refold-pipeline"
VERSION = 1
_TOP = (KEY, "transformations")


class BadPipeline(RefoldError, ValueError):
    """A pipeline file cannot be understood, or a pipeline cannot be written as one."""


def read_pipeline(path: str | Path) -> tuple[Transformation, ...]:
    """The transformations that a pipeline file names."""
    place = Path(path)
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadPipeline(f"The pipeline {place} cannot be read: {_reason(error)}.") from None
    return pipeline_from_text(text, str(place))


def write_pipeline(transformations: Iterable[Transformation], path: str | Path) -> Path:
    """Write a pipeline file, whole or not at all."""
    place, text = Path(path), pipeline_to_text(transformations)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=place.parent, delete=False) as file:
        try:
            file.write(text)
            file.close()
            os.chmod(file.name, 0o666 & ~_umask())
            os.replace(file.name, place)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    return place


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def pipeline_to_text(transformations: Iterable[Transformation]) -> str:
    """A pipeline as YAML. Settings that have their default value are left out; compositions are written flat."""
    items = [_entry(t) for t in _flat(transformations)]
    body = _yaml().safe_dump(
        {KEY: VERSION, "transformations": items}, sort_keys=False, allow_unicode=True, default_flow_style=None
    )
    return f"# Use it: refold optimize MODEL --pipeline FILE. What each one does: refold list.\n{body}"


def pipeline_from_text(text: str, origin: str = "the pipeline") -> tuple[Transformation, ...]:
    """The transformations that a YAML text names; `origin` says in errors where the text comes from."""
    data = _parse(text, origin)
    if not isinstance(data, dict) or KEY not in data:
        raise BadPipeline(f'{origin} is no pipeline: it must begin with "{KEY}: {VERSION}".')
    if data[KEY] != VERSION or isinstance(data[KEY], bool):
        raise BadPipeline(f"{origin} has version {data[KEY]!r}, and this Refold reads {VERSION}.")
    unknown = [str(key) for key in data if key not in _TOP]
    if unknown:
        raise BadPipeline(
            f"{origin} has unknown entries: {', '.join(unknown)}. It may have: {', '.join(sorted(_TOP))}."
        )
    items = data.get("transformations")
    if not isinstance(items, list):
        raise BadPipeline(f'{origin} needs a list under "transformations".')
    return tuple(_transformation(item, f"{origin}, entry {i}") for i, item in enumerate(items, 1))


# --- reading -----------------------------------------------------------------------------------------------------


def _parse(text: str, origin: str) -> Any:
    yaml = _yaml()

    class Loader(yaml.SafeLoader):  # type: ignore[name-defined]
        """YAML without what makes plain data surprising: aliases (they can explode) and keys given twice."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                raise yaml.YAMLError(f"line {self.peek_event().start_mark.line + 1}: aliases are not allowed")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = [key for i, key in enumerate(keys) if key in keys[:i]]
            if twice:
                raise yaml.YAMLError(f"line {node.start_mark.line + 1}: {twice[0]!r} is given twice")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise BadPipeline(f"{origin} is not valid YAML: {' '.join(str(error).split())}.") from None


def _transformation(item: Any, where: str) -> Transformation:
    name, settings = _name_and_settings(item, where)
    cls = transformation_named(name)
    known = _parameters(cls)
    unknown = [str(key) for key in settings if key not in known]
    if unknown:
        has = f"It has: {', '.join(known)}." if known else "It has none."
        raise BadPipeline(f"{where}: {name} has no setting {', '.join(unknown)}. {has}")
    values = {key: _decode(value, known[key], f"{where}: {name}.{key}") for key, value in settings.items()}
    try:
        return check_transformation(cls(**values))
    except RefoldError:
        raise
    except Exception as error:  # a class checks its settings as it likes
        raise BadPipeline(f"{where}: {name} refuses these settings: {type(error).__name__}: {error}.") from None


def _name_and_settings(item: Any, where: str) -> tuple[str, dict[str, Any]]:
    if isinstance(item, str):
        return item, {}
    if isinstance(item, dict) and len(item) == 1:
        (name, settings), *_ = item.items()
        if isinstance(name, str) and (settings is None or isinstance(settings, dict)):
            return name, settings or {}
    raise BadPipeline(f"{where} must be a name, or a name with settings such as `FoldBatchNorm: {{keep: original}}`.")


def _decode(value: Any, default: Any, where: str) -> Any:
    """A plain value as a setting: a list becomes a tuple, and a name a dtype, where the default value is one."""
    if isinstance(value, list):
        inner = default[0] if isinstance(default, (tuple, list)) and default else None
        items = [_decode(v, inner, where) for v in value]
        return items if isinstance(default, list) else tuple(items)
    if isinstance(value, str) and isinstance(default, torch.dtype):
        return _dtype(value, where)
    if isinstance(value, str) and isinstance(default, enum.Enum):
        return _member(value, type(default), where)
    if isinstance(value, bool) != isinstance(default, bool) and isinstance(default, (bool, int, float, str)):
        raise BadPipeline(f"{where} must be {_article(default)}, not {value!r}.")
    if isinstance(default, str) != isinstance(value, str) and isinstance(default, (str, int, float)):
        raise BadPipeline(f"{where} must be {_article(default)}, not {value!r}.")
    return value


def _article(default: Any) -> str:
    return {bool: "true or false", int: "a number", float: "a number", str: "a text"}[type(default)]


def _dtype(value: str, where: str) -> torch.dtype:
    found = getattr(torch, value.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise BadPipeline(f"{where} must be a dtype such as float16, not {value!r}.")
    return found


def _member(value: str, kind: type[enum.Enum], where: str) -> enum.Enum:
    if value not in kind.__members__:
        raise BadPipeline(f"{where} must be one of {', '.join(kind.__members__)}, not {value!r}.")
    return kind[value]


# --- writing -----------------------------------------------------------------------------------------------------


def _flat(transformations: Iterable[Transformation]) -> list[Transformation]:
    parts: list[Transformation] = []
    for t in transformations:
        check_transformation(t)
        parts += _flat(t.transformations) if isinstance(t, Composition) else [t]
    return parts


def _entry(transformation: Transformation) -> str | dict[str, Any]:
    name = name_of(transformation)
    settings = {}
    for key, default in _parameters(type(transformation)).items():
        if not hasattr(transformation, key):
            raise BadPipeline(
                f"{transformation!r} does not show its setting {key} as an attribute, so no file can hold it."
            )
        value = getattr(transformation, key)
        if type(value) is not type(default) or value != default:
            settings[key] = _encode(value, f"the setting {key} of {name}")
    return {name: settings} if settings else name


def _encode(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [_encode(v, where) for v in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _encode(v, where) for key, v in value.items()}
    raise BadPipeline(f"{where} is a {type(value).__name__}, which no pipeline file can hold.")


def _parameters(cls: type[Transformation]) -> dict[str, Any]:
    """The settings of a class, each with its default value."""
    if dataclasses.is_dataclass(cls):
        made = cls()
        return {f.name: getattr(made, f.name) for f in dataclasses.fields(cls) if f.init}
    if cls.__init__ is object.__init__:
        return {}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p.default for name, p in inspect.signature(cls).parameters.items() if p.kind in kinds}


def settings_of(cls: type[Transformation]) -> dict[str, Any]:
    """The settings of a class as plain values, for listings."""
    return {name: _shown(default) for name, default in _parameters(cls).items()}


def _shown(value: Any) -> Any:
    try:
        return _encode(value, "")
    except BadPipeline:
        return repr(value)


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise BadPipeline("Pipeline files need PyYAML: pip install pyyaml.") from None
    return yaml


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
