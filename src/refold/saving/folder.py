"""A folder that is written as one: at any moment it is the old one or the new one, and every byte is accounted for."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from refold.saving.errors import SaveError

FORMAT = "refold"
VERSION = 1
MANIFEST = "manifest.json"
_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9_-]+)*")
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2
_HERE = -100  # AT_FDCWD


# --- writing -------------------------------------------------------------------------------------------------------


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A folder beside the wanted one to write into; it takes its place when everything is on the disk, and is removed
    if anything is raised before."""
    _check_place(folder)
    tidy(folder)
    fresh = folder.parent / f".{folder.name}.saving-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        fresh.mkdir(parents=True)
        yield fresh
        _seal(fresh)
        _swap_in(fresh, folder)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
        raise SaveError(f"{folder} could not be saved: {reason}. What was there before is intact.") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _check_place(folder: Path) -> None:
    if folder.is_symlink():
        raise SaveError(f"{folder} is a symbolic link; give the folder that it points to.")
    if not folder.exists() or (folder.is_dir() and (not any(folder.iterdir()) or (folder / MANIFEST).is_file())):
        return
    raise SaveError(f"{folder} exists and holds something else than a saved model. Choose another folder.")


def _seal(fresh: Path) -> None:
    """Write the list of files with their sizes and hashes, and bring everything onto the disk."""
    _write_manifest(fresh, {path.name: _facts(path) for path in sorted(fresh.iterdir())})


def account_for(folder: Path, *names: str) -> None:
    """Put more files of a saved folder on its list, so that a changed byte in them is noticed."""
    _write_manifest(folder, _manifest(folder) | {name: _facts(folder / name) for name in names})


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb+") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def _write_manifest(folder: Path, files: dict[str, Any]) -> None:
    write_bytes(folder / MANIFEST, plain_json({"format": FORMAT, "version": VERSION, "files": files}))
    _sync_folder(folder)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file and bring it onto the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def plain_json(data: Any) -> bytes:
    """The one text of plain data."""
    return json.dumps(data, sort_keys=True, indent=1, allow_nan=False).encode()


def sha256(path: Path) -> str:
    """The hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _swap_in(fresh: Path, folder: Path) -> None:
    """Put the new folder in the old one's place: at once where the system can, else by two renames; who is killed
    between them leaves the old one aside, and `tidy` puts it back."""
    if not folder.exists():
        os.rename(fresh, folder)
    elif not _exchange(fresh, folder):
        aside = _aside(folder)
        os.rename(folder, aside)
        os.rename(fresh, folder)
        shutil.rmtree(aside, ignore_errors=True)
    _sync_folder(folder.parent)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two folders atomically (Linux); False where that is not possible."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(call(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _EXCHANGE) == 0)


def _aside(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.replaced"


def tidy(folder: Path) -> None:
    """Clean up after a process that was killed while it saved: the old folder comes back if the new one had not taken
    its place, and half-written ones of dead processes go."""
    aside = _aside(folder)
    if aside.is_dir() and not folder.exists():
        os.rename(aside, folder)
    elif aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside, ignore_errors=True)
    prefix = f".{folder.name}.saving-"
    for left in folder.parent.glob(f"{glob_escape(prefix)}*") if folder.parent.is_dir() else ():
        process = left.name.removeprefix(prefix).partition("-")[0]
        if process.isdigit() and not _is_alive(int(process)):
            shutil.rmtree(left, ignore_errors=True)


def glob_escape(text: str) -> str:
    """A text that a glob takes literally."""
    return re.sub(r"([*?\[])", r"[\1]", text)


def _is_alive(process: int) -> bool:
    if process == os.getpid():
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


# --- reading -------------------------------------------------------------------------------------------------------


def checked_files(folder: Path) -> dict[str, Path]:
    """The files of a saved folder by name, after every one was checked: kind, size and hash."""
    tidy(folder)
    found: dict[str, Path] = {}
    for name, facts in _manifest(folder).items():
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or not isinstance(facts, dict):
            raise SaveError(f"{folder / MANIFEST} names the file {name!r}, which is no plain file name: refused.")
        found[name] = _checked(folder / name, facts)
    return found


def checked_file(folder: Path, name: str) -> Path:
    """One file of a saved folder, checked if it is on the list (older versions listed the model's own files only)."""
    facts = _manifest(folder).get(name)
    return _checked(folder / name, facts) if isinstance(facts, dict) else folder / name


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not folder.is_dir() or not path.exists():
        raise SaveError(f"{folder} is no saved model: it has no {MANIFEST}.")
    _check_regular(path)
    text = path.read_bytes()
    data = parsed(text, path)
    if data.get("format") != FORMAT or type(data.get("version")) is not int:
        raise SaveError(f"{path} is not the manifest of a saved model.")
    if data["version"] > VERSION:
        raise SaveError(
            f"{folder} was saved in format {data['version']} by a newer Refold; this one reads up to {VERSION}. "
            f"Upgrade: pip install -U refold."
        )
    if data["version"] < 1 or not isinstance(data.get("files"), dict) or plain_json(data) != text:
        raise SaveError(f"{path} was changed after it was saved.")
    files: dict[str, Any] = data["files"]
    return files


def parsed(text: bytes, path: Path) -> dict[str, Any]:
    """A JSON object of a file."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SaveError(f"{path} is damaged: {error}.") from None
    if not isinstance(data, dict):
        raise SaveError(f"{path} is damaged: it holds no object.")
    return data


def _check_regular(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except OSError:
        raise SaveError(f"{path} is missing.") from None
    if not stat.S_ISREG(mode):
        raise SaveError(f"{path} is not a plain file (a symbolic link or something else): refused.")


def _checked(path: Path, facts: dict[str, Any]) -> Path:
    _check_regular(path)
    size = path.stat().st_size
    if size != facts.get("bytes"):
        raise SaveError(f"{path} is damaged: it has {size} bytes where {facts.get('bytes')} were saved.")
    if sha256(path) != facts.get("sha256"):
        raise SaveError(f"{path} is damaged: its bytes are not those that were saved.")
    return path
