"""The folder in which decisions are kept between processes: the user's own, private, of limited size, one entry a key.

An entry is a folder with a JSON text in it, and with what compilers keep there themselves. Nothing in it is needed: it
may be deleted at any time, by the least recently used first when all of it is larger than `LIMIT`.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from refold.saving.folder import replace_file

VARIABLE = "REFOLD_CACHE"
OFF = "off"
LIMIT = 2 * 10**9  # bytes
_OWN = "decisions"
_DECISION = "decision.json"
_COMPILED = "compiled"
_LOCK = ".lock"
_KEY = re.compile(r"[0-9a-f]{32}")
_BETWEEN_LOOKS = 0.05  # seconds, at a lock that another process holds


def usual_place() -> Path:
    """Where a user's caches lie on this system; `REFOLD_CACHE` names another folder."""
    if said := os.environ.get(VARIABLE):
        return Path(said).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "refold"
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "refold" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "refold"


def cache_of_user() -> CacheFolder | None:
    """The cache of the user who runs this process; None where it is turned off, or where the user has no home."""
    if os.environ.get(VARIABLE) == OFF:
        return None
    try:
        return CacheFolder(usual_place() / _OWN)
    except RuntimeError:
        return None


@dataclass(frozen=True)
class Entry:
    """What is kept under one key."""

    key: str
    folder: Path

    @property
    def text(self) -> Path:
        """The file of the decision."""
        return self.folder / _DECISION

    @property
    def compiled(self) -> Path:
        """The folder for what compilers keep."""
        return self.folder / _COMPILED

    @property
    def used(self) -> float:
        """When it was last used, in seconds since 1970."""
        try:
            return self.text.stat().st_mtime
        except OSError:
            return 0.0

    @property
    def size(self) -> int:
        """Its bytes on the disk."""
        return sum(_size(Path(place) / name) for place, _, names in os.walk(self.folder) for name in names)

    def remove(self) -> None:
        """Delete it, the text first: what is left of a removal that was stopped counts for nothing."""
        with suppress(OSError):
            self.text.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


@dataclass(frozen=True)
class CacheFolder:
    """The entries of one user. Whatever is not this user's alone is not used: `OSError` says why."""

    path: Path

    def entry(self, key: str) -> Entry:
        """The place of an entry, whether there is one or not."""
        return Entry(key, self.path / key)

    def entries(self) -> list[Entry]:
        """All entries, the most recently used first."""
        if not self.path.is_dir():
            return []
        self.check()
        found = [Entry(each.name, each) for each in self.path.iterdir() if _KEY.fullmatch(each.name)]
        return sorted(found, key=lambda entry: entry.used, reverse=True)

    def check(self) -> None:
        """Refuse a folder that others own, or may write into."""
        facts = self.path.lstat()
        if not stat.S_ISDIR(facts.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, f"{self.path} is no folder")
        if os.name != "nt" and facts.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, f"{self.path} belongs to another user")
        if os.name != "nt" and facts.st_mode & 0o077:
            raise PermissionError(errno.EPERM, f"{self.path} is open to other users (chmod 700 closes it)")

    def read(self, key: str) -> bytes | None:
        """The text of an entry; None where there is none."""
        try:
            self.check()
            text = self.entry(key).text.read_bytes()
        except FileNotFoundError:
            return None
        with suppress(OSError):  # a cache that is read only has no order of use
            os.utime(self.entry(key).text)
        return text

    def write(self, key: str, text: str) -> None:
        """Keep a text, whole or not at all, and delete what is too much."""
        entry = self._made(key)
        for left in entry.folder.glob(f".{_DECISION}.*"):  # of a process that was killed: this one holds the lock
            left.unlink(missing_ok=True)
        replace_file(entry.text, text)
        self._evict(key)

    def compiled(self, key: str) -> Path | None:
        """The folder for what compilers keep under a key; None where nothing can be kept."""
        try:
            self._make()
        except OSError:
            return None
        return self.entry(key).compiled

    def _made(self, key: str) -> Entry:
        entry = self.entry(key)
        self._make()
        entry.folder.mkdir(mode=0o700, exist_ok=True)
        return entry

    def _make(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        self.check()

    def _evict(self, key: str) -> None:
        room = LIMIT - self.entry(key).size
        for entry in self.entries():
            if entry.key != key and (room := room - entry.size) < 0:
                entry.remove()

    def clear(self) -> int:
        """Delete all entries; how many there were."""
        found = self.entries()
        for entry in found:
            entry.remove()
        for lock in self.path.glob(f"*{_LOCK}") if found else ():
            lock.unlink(missing_ok=True)
        return len(found)

    @contextmanager
    def locked(self, key: str, seconds: float, waiting: Callable[[], None]) -> Iterator[bool]:
        """Let one process at a time decide what belongs to a key: another one waits, but not longer than so many
        seconds. Whether this one had to wait. Where nothing can be locked, nobody waits."""
        try:
            self._make()
            handle = os.open(self.path / f"{key}{_LOCK}", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            yield False
            return
        try:
            yield _wait_for_lock(handle, seconds, waiting)
        finally:
            os.close(handle)


def _wait_for_lock(handle: int, seconds: float, waiting: Callable[[], None]) -> bool:
    """Whether another process held the lock when it was first asked for."""
    if os.name == "nt":
        return False
    import fcntl

    end, had_to_wait = time.monotonic() + seconds, False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return had_to_wait
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > end:
                return had_to_wait  # a file system without locks, or one that is held for too long
        if not had_to_wait:
            waiting()
        had_to_wait = True
        time.sleep(_BETWEEN_LOOKS)
