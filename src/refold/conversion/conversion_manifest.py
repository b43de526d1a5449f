"""The manifest of a converted folder: what was made from which files, and all that the way back needs. It may come from
anybody, so all of it is checked when it is read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refold.conversion.checkpoint_folder import INDEX, MANIFEST, SUFFIX, parse_header, read_object
from refold.conversion.conversion_job import Former, Job
from refold.conversion.tensor_plan import Plan
from refold.errors import WrongInput
from refold.saving.folder import plain_json

FORMAT = "refold-conversion"
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """What a folder says of the conversion that made it."""

    origin: str
    to: str
    back: bool
    plan: Plan
    former: Former
    source: dict[str, Any]
    """The sizes and checksums of the files that it was made from."""


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, where it has one."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    data = read_object(path)
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        raise WrongInput(f"{path} was not written by this version of refold convert (version {VERSION}).")
    try:
        return Manifest(
            _text(data["from"]),
            _text(data["to"]),
            _checked(data["back"], bool),
            Plan.from_plain(data["plan"]),
            Former(_headers(data["headers"], path), _index(data["index"])),
            _checked(data["source"], dict),
        )
    except (WrongInput, KeyError, TypeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise WrongInput(f"{path} is damaged: {reason}.") from None


def manifest_of(job: Job, origin: str, to: str, passed: Iterable[str]) -> dict[str, Any]:
    """What the manifest of a conversion says besides checksums."""
    index = job.source.index
    data = {
        "format": FORMAT,
        "version": VERSION,
        "from": origin,
        "to": to,
        "back": job.back,
        "plan": job.plan.to_plain(),
        "passed": sorted(passed),
        "headers": {file.name: file.header for file in job.source.files.values()},
        "index": None if index is None else {"name": index[0], "text": index[1]},
    }
    found: dict[str, Any] = json.loads(plain_json(data))
    return found


def _headers(data: Any, path: Path) -> dict[str, str]:
    for name, header in _checked(data, dict).items():
        _file_name(name, SUFFIX)
        parse_header(_text(header), f"the header of {name} in {path.name}", name)
    return dict(data)


def _index(data: Any) -> tuple[str, str] | None:
    if data is None:
        return None
    facts = _checked(data, dict)
    text = _text(facts["text"])
    _checked(json.loads(text)["weight_map"], dict)
    return _file_name(facts["name"], INDEX), text


def _file_name(name: Any, suffix: str) -> str:
    if _text(name) != os.path.basename(name) or not name.endswith(suffix) or set(name) & set("\\\0"):
        raise ValueError(f"{name!r} is no file of the folder")
    return str(name)


def _text(data: Any) -> str:
    return str(_checked(data, str))


def _checked(data: Any, kind: type) -> Any:
    if not isinstance(data, kind):
        raise TypeError(f"{data!r} is no {kind.__name__}")
    return data
