"""A checkpoint as a folder of safetensors files: what lies where, all of it checked before any tensor is read."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refold.errors import WrongInput

BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32}
BITS |= {"U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
BITS |= {"C64": 64, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}
SUFFIX = ".safetensors"
MANIFEST = "refold-conversion.json"
PIECES = "DCP_SHARDING_INFO"
"""Metadata in which torch.distributed.checkpoint says of every tensor of a file where in the whole one it lies."""
INDEX = ".safetensors.index.json"
_LONGEST_HEADER = 100_000_000
_NUMBERED = re.compile(r"(.*?)-?(\d+)-of-(\d+)\.safetensors")
_OTHER_WEIGHTS = (SUFFIX, ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class Kind:
    """What a tensor is, besides its values."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return math.prod(self.shape) * BITS[self.dtype] // 8

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Extent:
    """A run of bytes in a file; those of no file are zeros."""

    file: str
    start: int
    size: int


@dataclass(frozen=True)
class ShardFile:
    """One safetensors file."""

    name: str
    size: int
    modified: int
    header: str
    metadata: dict[str, str] | None
    tensors: dict[str, tuple[Kind, Extent]]


@dataclass(frozen=True)
class Checkpoint:
    """A folder of safetensors files. `tensors` says what every tensor is, and in which run of bytes it lies."""

    folder: Path
    files: dict[str, ShardFile]
    index: tuple[str, str] | None
    """The name and the text of the index, where there is one."""
    others: tuple[str, ...]
    """Files beside the weights, which go along."""
    left_out: tuple[str, ...]
    """Weights in other formats, files that the index does not name, and folders: they do not go along."""

    def tensors(self) -> dict[str, tuple[Kind, Extent]]:
        """All tensors by name, in the order of the files."""
        return {name: entry for file in self.files.values() for name, entry in file.tensors.items()}

    def config(self) -> dict[str, Any]:
        """The model's configuration, as far as there is one."""
        path = self.folder / "config.json"
        return read_object(path) if path.is_file() else {}


def read_checkpoint(folder: Path) -> Checkpoint:
    """What a folder holds. Every way in which it contradicts itself is an error that says so."""
    if not folder.is_dir():
        raise WrongInput(f"{folder} is no folder; give the one that holds the safetensors files.")
    entries = sorted(os.listdir(folder))
    plain = [name for name in entries if (folder / name).is_file()]
    shards = [name for name in plain if name.endswith(SUFFIX)]
    index = _read_index(folder, [name for name in plain if name.endswith(INDEX)])
    named = sorted(set(index[2].values())) if index else shards
    if not named:
        raise WrongInput(f"{folder} holds no safetensors files.")
    dead = next((name for name in entries if name.endswith(SUFFIX) and not (folder / name).exists()), None)
    if index:
        _check_listed(folder, index[0], named, shards)
    elif dead is not None:
        raise WrongInput(f"{folder / dead} is a link that leads nowhere.")
    _check_numbers(folder, named, f"{index[0]} names no tensor of it" if index else "it is not there")
    files = {name: read_header(folder / name) for name in named}
    _check_unique(files.values())
    if index:
        _check_index(index[0], index[2], files)
    left = [n for n in entries if n not in plain or (n not in files and n.endswith(_OTHER_WEIGHTS))]
    taken = {*files, *left, MANIFEST, index[0] if index else ""}
    others = tuple(name for name in plain if name not in taken)
    return Checkpoint(folder, files, index[:2] if index else None, others, tuple(left))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        return parse_object(path.read_bytes().decode("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise WrongInput(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def parse_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object in a text; a key that is given twice is an error, not a choice."""
    try:
        data = json.loads(text, object_pairs_hook=lambda pairs: _once(pairs, where))
    except (ValueError, RecursionError) as error:
        raise WrongInput(f"{where} is damaged: {error}.") from None
    if not isinstance(data, dict):
        raise WrongInput(f"{where} is damaged: it holds no object.")
    return data


def _once(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise WrongInput(f"{where} gives {twice!r} twice.")
    return found


# --- the index -----------------------------------------------------------------------------------------------------


def _read_index(folder: Path, found: list[str]) -> tuple[str, str, dict[str, str]] | None:
    if len(found) > 1:
        raise WrongInput(f"{folder} holds more than one index: {', '.join(found)}. Leave the one that counts.")
    if not found:
        return None
    path = folder / found[0]
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WrongInput(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    placed = parse_object(text, str(path)).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(name, str) for name in placed.values()):
        raise WrongInput(f"{path} is damaged: it has no weight_map that gives each tensor a file.")
    for name in placed.values():
        if name != os.path.basename(name) or name in ("", ".", "..") or "\\" in name or "\0" in name:
            raise WrongInput(f"{path} names the file {name!r}, which is not in its own folder: refused.")
        if not name.endswith(SUFFIX):
            raise WrongInput(f"{path} names the file {name!r}, which is no safetensors file.")
    return found[0], text, placed


def _check_listed(folder: Path, index: str, named: list[str], shards: list[str]) -> None:
    missing = [name for name in named if name not in shards]
    if missing:
        raise WrongInput(f"{folder / missing[0]} is missing: {index} says that tensors are in it.")
    families = {(m[1], m[3]) for m in map(_NUMBERED.fullmatch, named) if m}
    for name in shards:
        match = _NUMBERED.fullmatch(name)
        if match and (match[1], match[3]) in families and name not in named:
            raise WrongInput(f"{folder / name} belongs to the others, but {index} names no tensor of it.")


def _check_numbers(folder: Path, named: list[str], why: str) -> None:
    """Files that count themselves, 1 of 3, must all be there."""
    families = {(m[1], m[3]) for m in map(_NUMBERED.fullmatch, named) if m}
    for prefix, total in sorted(families):
        have = {int(m[2]) for m in map(_NUMBERED.fullmatch, named) if m and (m[1], m[3]) == (prefix, total)}
        gap = next((n for n in range(1, int(total) + 1) if n not in have), None)
        if gap is not None and 0 not in have and len(have) < int(total):
            raise WrongInput(f"{folder} lacks file {gap} of {int(total)} of {prefix or 'its weights'}: {why}.")


def _check_index(index: str, placed: Mapping[str, str], files: Mapping[str, ShardFile]) -> None:
    for name, file in placed.items():
        if name not in files[file].tensors:
            raise WrongInput(f"{index} says that {name} is in {file}, and it is not.")
    for shard in files.values():
        unlisted = next((name for name in shard.tensors if placed.get(name) != shard.name), None)
        if unlisted is not None:
            raise WrongInput(f"{shard.name} holds {unlisted}, which {index} does not list.")


def _check_unique(files: Iterable[ShardFile]) -> None:
    places: dict[str, str] = {}
    for file in files:
        for name in file.tensors:
            if name in places and PIECES in (file.metadata or {}):
                raise WrongInput(
                    f"{file.name} holds a piece of {name}, as does {places[name]}: torch.distributed.checkpoint wrote "
                    f"them so. Join them first, by its consolidate_safetensors_files."
                )
            if name in places:
                raise WrongInput(f"{name} is in {places[name]} and again in {file.name}: one name, two tensors.")
            places[name] = file.name


# --- one file ------------------------------------------------------------------------------------------------------


def read_header(path: Path) -> ShardFile:
    """The header of a safetensors file, checked against the file's size."""
    try:
        facts = path.stat()
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if facts.st_size < 8 or length > min(facts.st_size - 8, _LONGEST_HEADER):
                raise WrongInput(f"{path} is truncated, or no safetensors file: its header does not fit into it.")
            header = file.read(length).decode("utf-8")
    except UnicodeDecodeError:
        raise WrongInput(f"{path} is no safetensors file: its header is no text.") from None
    except OSError as error:
        raise WrongInput(f"{path} cannot be read: {error.strerror or error}.") from None
    metadata, tensors = parse_header(header, str(path), path.name)
    needed = max((extent.start + extent.size for _, extent in tensors.values()), default=8 + length)
    if needed > facts.st_size:
        raise WrongInput(f"{path} is truncated: it has {facts.st_size:,} bytes and its tensors need {needed:,}.")
    if needed < facts.st_size:
        raise WrongInput(f"{path} is damaged: it has {facts.st_size - needed:,} bytes behind its last tensor.")
    return ShardFile(path.name, facts.st_size, facts.st_mtime_ns, header, metadata, tensors)


def parse_header(header: str, where: str, file: str) -> tuple[dict[str, str] | None, dict[str, tuple[Kind, Extent]]]:
    """The metadata and the tensors of the header of a file, in the order of their bytes, which follow one another
    without a gap; `where` says in errors where the header comes from."""
    data = parse_object(header, where)
    metadata = data.pop("__metadata__", None)
    if metadata is not None and not _is_text_table(metadata):
        raise WrongInput(f"{where} is damaged: its metadata must give texts to names.")
    base = place = 8 + len(header.encode())
    found = {name: _entry(where, name, facts, base, file) for name, facts in data.items()}
    tensors = dict(sorted(found.items(), key=lambda item: (item[1][1].start, item[1][1].size)))
    for _, extent in tensors.values():
        if extent.start != place:
            raise WrongInput(f"{where} is damaged: its tensors overlap, or bytes between them belong to none.")
        place += extent.size
    return metadata, tensors


def _is_text_table(data: Any) -> bool:
    return isinstance(data, dict) and all(isinstance(text, str) and _is_text(key + text) for key, text in data.items())


def _is_text(text: str) -> bool:
    """Whether a text can be written; JSON may name halves of characters, which cannot."""
    return text.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in text)


def _entry(where: str, name: str, facts: Any, base: int, file: str) -> tuple[Kind, Extent]:
    match facts:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]} if (
            dtype in BITS
            and 0 <= start <= stop
            and all(type(size) is int and size >= 0 for size in shape)
            and _is_text(name)
        ):
            kind = Kind(dtype, tuple(shape))
            if stop - start == kind.nbytes:
                return kind, Extent(file, base + start, stop - start)
            raise WrongInput(f"{where} is damaged: {name} is {kind} and has {stop - start} bytes.")
    raise WrongInput(f"{where} is damaged: what it says of {name!r} cannot be understood.")


def made_header(tensors: Mapping[str, Kind], metadata: Mapping[str, str] | None) -> str:
    """The header of a new file with these tensors, in this order."""
    data: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    place = 0
    for name, kind in tensors.items():
        data[name] = {"dtype": kind.dtype, "shape": list(kind.shape), "data_offsets": [place, place + kind.nbytes]}
        place += kind.nbytes
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return text + " " * (-len(text.encode()) % 8)


def stored_order(tensors: Mapping[str, Kind]) -> dict[str, Kind]:
    """Tensors as safetensors orders them: the wide dtypes first, so that every tensor is aligned, then by name."""
    return dict(sorted(tensors.items(), key=lambda item: (-BITS[item[1].dtype], item[0])))
