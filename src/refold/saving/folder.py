"""Folders and files that Refold writes as one: at any moment the old files or the new ones, and nobody else's."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from refold.errors import SaveError

FORMAT = "refold"
VERSION = 1
MANIFEST = "manifest.json"
_FILE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*(\.[a-z0-9_-]+)*")
_SAVING = "saving-"
_NEW = ".refold-new"


# --- writing -------------------------------------------------------------------------------------------------------


@contextmanager
def replaced(folder: Path, *, editable: Collection[str] = ()) -> Iterator[Path]:
    """An empty folder to write into. When everything in it is on the disk, its files take the places of those that
    Refold wrote into `folder` before; it is removed if anything is raised before. Other files in `folder` stay as they
    are. Files named in `editable` have no hash in the manifest: people may change them."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise SaveError(f"{folder} is a file or a symbolic link; give the folder itself.")
    tidy(folder)
    check_names_free(folder, [MANIFEST])
    fresh = _unfinished(folder)
    try:
        fresh.mkdir(parents=True)
        yield fresh
        seal(fresh, editable)
        _commit(fresh, folder)
    except OSError as error:
        raise SaveError(f"{folder} could not be saved: {reason_of(error)}. What was there before is intact.") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        tidy(folder)


def own_files(folder: Path) -> set[str]:
    """The names of the files in a folder that Refold wrote, by the manifest in it."""
    if not (folder / MANIFEST).exists():
        return set()
    data = _manifest(folder)
    return {MANIFEST, *data["files"], *data.get("editable", ())}


def check_names_free(folder: Path, names: Iterable[str]) -> None:
    """Refuse to write into a folder where files of these names stand that Refold did not write."""
    try:
        own = own_files(folder)
    except SaveError as reason:
        raise SaveError(
            f"{reason} So nothing is written there: move the file away, or choose another folder."
        ) from None
    taken = sorted(name for name in names if name not in own and os.path.lexists(folder / name))
    if taken:
        raise SaveError(
            f"{folder} holds {', '.join(taken)}, which Refold did not write, and needs the name for a file of its own. "
            f"Nothing was written: move it away, or choose another folder."
        )


def replace_file(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    fresh = _unfinished(path)
    try:
        write_bytes(fresh, text.encode())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def _unfinished(place: Path) -> Path:
    """A name in the same folder, used by no other writer, that `tidy` recognises."""
    place = place.absolute()
    return place.parent / f".{place.name}.{_SAVING}{os.getpid()}-{secrets.token_hex(4)}"


def reason_of(error: OSError) -> str:
    """Why writing failed, for use inside a sentence."""
    return "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))


def seal(folder: Path, editable: Collection[str] = ()) -> None:
    """Bring every file onto the disk, and write the list of their sizes and hashes."""
    files = {}
    for path in folder.iterdir():
        path.chmod(folder.stat().st_mode & 0o666)  # some writers make files that only their owner may read
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        if path.name not in (MANIFEST, *editable):
            files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    manifest = {"format": FORMAT, "version": VERSION, "files": files}
    write_bytes(folder / MANIFEST, plain_json(manifest | ({"editable": sorted(editable)} if editable else {})))
    sync_folder(folder)


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


def sync_folder(folder: Path) -> None:
    """Bring the names of a folder's files onto the disk."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _commit(fresh: Path, folder: Path) -> None:
    """One rename, after which the new files count and not the old ones."""
    if folder.exists():
        with _alone(folder):
            _finish(folder)
            check_names_free(folder, [path.name for path in fresh.iterdir()])
            os.rename(fresh, folder / _NEW)
    else:
        os.rename(fresh, folder)
    sync_folder(folder.parent)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Only one writer or reader at a time puts files in place, where the system can lock a folder."""
    if os.name == "nt":
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def tidy(folder: Path) -> None:
    """Put new files that were committed into their places, also those of a process that was stopped, and remove the
    half-written folders of dead processes."""
    if (folder / _NEW).is_dir():
        with _alone(folder):
            _finish(folder)
    place = folder.absolute()
    prefix = f".{place.name}.{_SAVING}"
    for left in place.parent.glob(f"{glob.escape(prefix)}*"):
        process = left.name.removeprefix(prefix).partition("-")[0]
        if process.isdigit() and not _is_alive(int(process)):
            shutil.rmtree(left, ignore_errors=True)


def _finish(folder: Path) -> None:
    new = folder / _NEW
    if new.is_symlink() or not new.is_dir():
        return
    try:
        if (new / MANIFEST).exists():
            _put_in_place(new, folder)
        new.rmdir()
    except OSError as error:
        raise SaveError(f"The new files of {folder} lie in {new} and cannot leave it: {reason_of(error)}.") from error


def _put_in_place(new: Path, folder: Path) -> None:
    """From the old files to the new ones. The manifest goes last: until it is there, all of this can be done again."""
    names = own_files(new)
    for name in own_files(folder) - names:
        (folder / name).unlink(missing_ok=True)
    for name in (*names - {MANIFEST}, MANIFEST):
        with suppress(FileNotFoundError):  # it is in its place already
            os.replace(new / name, folder / name)
    sync_folder(folder)


def _is_alive(process: int) -> bool:
    if process == os.getpid():
        return True
    try:
        os.kill(process, 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True


# --- reading -------------------------------------------------------------------------------------------------------


def checked_files(folder: Path) -> dict[str, Path]:
    """The files of a saved folder by name, after every one was checked: kind, size and hash."""
    tidy(folder)
    return {name: _checked(folder / name, facts) for name, facts in _manifest(folder)["files"].items()}


def checked_file(folder: Path, name: str) -> Path:
    """One file of a saved folder, checked if it is on the list (older versions listed the model's own files only)."""
    facts = _manifest(folder)["files"].get(name)
    return folder / name if facts is None else _checked(folder / name, facts)


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
            "Update Refold to read it."
        )
    if data["version"] < 1 or not isinstance(data.get("files"), dict) or plain_json(data) != text:
        raise SaveError(f"{path} was changed after it was saved.")
    for name, facts in (*data["files"].items(), *((name, {}) for name in data.get("editable", ()))):
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or not isinstance(facts, dict):
            raise SaveError(f"{path} names the file {name!r}, which is no plain file name: refused.")
    return data


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
