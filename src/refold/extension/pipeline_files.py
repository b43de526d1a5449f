"""Pipelines as files: transformations in order, by name, with plain settings, in YAML.

    refold-pipeline: 1
    transformations:
      - RemoveNoOps
      - FoldBatchNorm: {keep: original}

Names are looked up among the registered transformations and nowhere else, and settings are plain values, so reading
another person's pipeline runs none of that person's code.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from refold.errors import BadPipeline, RefoldError
from refold.extension.plugins import name_of, transformation_named
from refold.rewrite.composition import Composition
from refold.rewrite.description import NotPlain, default_settings, from_plain, settings_of, to_plain
from refold.rewrite.transformation import Transformation, check_transformation
from refold.saving.folder import replace_file
from refold.wording import one_line

KEY = "refold-pipeline"
VERSION = 1
_TOP = (KEY, "transformations")


def read_pipeline(path: str | Path) -> tuple[Transformation, ...]:
    """The transformations that a pipeline file names."""
    place = Path(path)
    try:
        text = place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadPipeline(f"The pipeline {place} cannot be read: {reason}.") from None
    return pipeline_from_text(text, str(place))


def write_pipeline(transformations: Iterable[Transformation], path: str | Path) -> Path:
    """Write a pipeline file, whole or not at all."""
    place = Path(path)
    replace_file(place, pipeline_to_text(transformations))
    return place


def pipeline_to_text(transformations: Iterable[Transformation]) -> str:
    """A pipeline as YAML. Settings that have their default value are left out; compositions are written flat."""
    items = [_entry(t) for t in _flat(transformations)]
    body = _yaml().safe_dump(
        {KEY: VERSION, "transformations": items}, sort_keys=False, allow_unicode=True, default_flow_style=None
    )
    return f"# Use it: refold optimize MODEL --pipeline FILE. What each one does: refold list.\n{body}"


def pipeline_from_text(text: str, origin: str = "the pipeline") -> tuple[Transformation, ...]:
    """The transformations that a YAML text names; `origin` says in errors where the text comes from."""
    data = yaml_data(text, origin)
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


def yaml_data(text: str, origin: str, refused: type[RefoldError] = BadPipeline) -> Any:
    """Plain data of a YAML text; what cannot be read is `refused` with a sentence."""
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
        raise refused(f"{origin} is not valid YAML: {one_line(error)}.") from None


def _transformation(item: Any, where: str) -> Transformation:
    name, settings = _name_and_settings(item, where)
    cls = transformation_named(name)
    known = default_settings(cls)
    unknown = [str(key) for key in settings if key not in known]
    if unknown:
        has = f"It has: {', '.join(known)}." if known else "It has none."
        raise BadPipeline(f"{where}: {name} has no setting {', '.join(unknown)}. {has}")
    values = {key: _setting(value, known[key], f"{where}: {name}.{key}") for key, value in settings.items()}
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


def _setting(value: Any, default: Any, where: str) -> Any:
    """A plain value as a setting; one of another kind than the default value's is refused."""
    if isinstance(value, list) and isinstance(default, list | tuple) and default:
        items = [_setting(item, default[0], where) for item in value]
        return items if isinstance(default, list) else tuple(items)
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "a text"}
    if type(default) in kinds and any(isinstance(value, kind) != isinstance(default, kind) for kind in (bool, str)):
        raise BadPipeline(f"{where} must be {kinds[type(default)]}, not {value!r}.")
    try:
        return from_plain(value, default)
    except ValueError as error:
        raise BadPipeline(f"{where} {error}.") from None


# --- writing -----------------------------------------------------------------------------------------------------


def _flat(transformations: Iterable[Transformation]) -> list[Transformation]:
    parts: list[Transformation] = []
    for t in transformations:
        check_transformation(t)
        parts += _flat(t.transformations) if isinstance(t, Composition) else [t]
    return parts


def _entry(transformation: Transformation) -> str | dict[str, Any]:
    name, values, settings = name_of(transformation), settings_of(transformation), {}
    for key, default in default_settings(type(transformation)).items():
        if key not in values:
            raise BadPipeline(
                f"{transformation!r} does not show its setting {key} as an attribute, so no file can hold it."
            )
        if type(values[key]) is type(default) and values[key] == default:
            continue
        try:
            settings[key] = to_plain(values[key])
        except NotPlain as reason:
            raise BadPipeline(f"the setting {key} of {name} {reason}.") from None
    return {name: settings} if settings else name


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise BadPipeline("YAML files need PyYAML: pip install pyyaml.") from None
    return yaml
