"""The folder in which a conversion is under way: whatever is done in it stays done if the process is killed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from refold.conversion.checkpoint_folder import MANIFEST, read_object
from refold.errors import SaveError, WrongInput
from refold.saving.folder import plain_json, reason_of, replace_file, sync_folder, write_bytes

_JOB = "job.json"


class WorkFolder:
    """Files are written into a hidden folder beside the result, and noted in a journal when they are on the disk. When
    all are, their folder takes the result's name by one rename."""

    def __init__(self, result: Path) -> None:
        place = result.absolute()
        self.result = result
        self._work = place.parent / f".{place.name}.converting"
        self.path = self._work / "files"
        """Where files are written until all of them are."""
        self._journal = self._work / "journal"

    @contextmanager
    def open(self, identity: str) -> Iterator[bool]:
        """Hold the folder alone; whether it has work of this job in it. What another job left is thrown away."""
        with self.telling():
            self._work.mkdir(parents=True, exist_ok=True)
            handle = self._locked()
            try:
                begun = self._is_of(identity)
                if not begun:
                    self._empty(identity)
                yield begun
            finally:
                os.close(handle)

    def facts(self, kind: str, name: str) -> dict[str, Any] | None:
        """What was noted of a piece of work that is done."""
        path = self._journal / f"{kind}-{name}.json"
        return read_object(path) if path.exists() else None

    def note(self, kind: str, name: str, facts: dict[str, Any]) -> None:
        """Note that a piece of work is done, and on the disk."""
        replace_file(self._journal / f"{kind}-{name}.json", plain_json(facts).decode())

    def finish(self, manifest: bytes) -> None:
        """Give the result its name. A kill before the rename leaves all that is needed to do this again."""
        write_bytes(self.path / MANIFEST, manifest)
        sync_folder(self.path)
        os.rename(self.path, self.result)  # over an empty folder too, and never over anything else
        sync_folder(self._work.parent)
        self.discard()

    def discard(self) -> None:
        """Throw away what is left of the work."""
        shutil.rmtree(self._work, ignore_errors=True)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """What the system refuses, as a sentence."""
        try:
            yield
        except OSError as error:
            left = f" What is done so far lies in {self._work}: the same command goes on from there."
            raise SaveError(
                f"{self.result} could not be written: {reason_of(error)}. What was there before is intact."
                f"{left if self._journal.is_dir() else ''}"
            ) from error

    def _locked(self) -> int:
        handle = os.open(self._work, os.O_RDONLY)
        if os.name != "nt":
            import fcntl

            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    os.close(handle)
                    raise WrongInput(f"another process is converting into {self.result} now.") from None
        return handle

    def _is_of(self, identity: str) -> bool:
        try:
            return read_object(self._journal / _JOB).get("identity") == identity
        except WrongInput:
            return False

    def _empty(self, identity: str) -> None:
        for entry in self._work.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        self.path.mkdir()
        self._journal.mkdir()
        replace_file(self._journal / _JOB, plain_json({"identity": identity}).decode())
