"""Bytes between files and tensors: read, written, copied and hashed by runs."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from refold.conversion.byte_extents import Placed, integer_dtype
from refold.conversion.checkpoint_folder import Extent
from refold.errors import WrongInput
from refold.fingerprint import flat_bytes, raw_bytes

PIECE = 1 << 20
"""So many bytes are moved at once: few enough to stay in the processor's cache from one step to the next."""
Tell = Callable[[int], None]
"""Told how many bytes were done; raises `Stopped` where others have failed meanwhile."""


class Stopped(Exception):
    """Another part of the work failed, or was interrupted."""


class OpenFiles:
    """The files of a folder, opened when they are first read, and closed together."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._open, self._stack = folder, dict[str, int](), ExitStack()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def handle(self, name: str) -> int:
        """The handle of a file."""
        if name not in self._open:
            self._open[name] = self._stack.enter_context((self._folder / name).open("rb")).fileno()
        return self._open[name]

    def read(self, extent: Extent, into: memoryview) -> None:
        """Read a run of bytes."""
        done = 0
        while done < extent.size:
            piece = into[done : min(extent.size, done + PIECE)]
            count = os.preadv(self.handle(extent.file), [piece], extent.start + done) if extent.file else len(piece)
            if not count:
                raise self._shorter(extent)
            if not extent.file:
                piece[:] = bytes(count)
            done += count

    def copy(self, extent: Extent, target: int, place: int, tell: Tell) -> None:
        """Copy a run of bytes into another file, which has zeros there already."""
        buffer = memoryview(bytearray(min(PIECE, extent.size)))
        for done in range(0, extent.size, PIECE):
            piece = buffer[: extent.size - done]
            if extent.file:
                self.read(Extent(extent.file, extent.start + done, len(piece)), piece)
                _write(target, piece, place + done)
            tell(len(piece))

    def tensor(self, placed: Placed) -> torch.Tensor:
        """A tensor, as integers as wide as its elements."""
        flat = torch.empty(placed.kind.nbytes, dtype=torch.uint8)
        view, place = raw_bytes(flat), 0
        for extent in placed.extents or ():
            self.read(extent, view[place : place + extent.size])
            place += extent.size
        return flat.view(integer_dtype(placed.kind)).reshape(placed.kind.shape)

    def _shorter(self, extent: Extent) -> WrongInput:
        return WrongInput(f"{self._folder / extent.file} became shorter while it was read.")


def make_room(target: int, size: int) -> None:
    """Give a new file its size, in zeros. Linux finds room for all of it at once, which costs it less than page by page
    (not by `os.posix_fallocate`, which writes into every page where the file system cannot do that)."""
    os.ftruncate(target, size)
    reserve = getattr(ctypes.CDLL(None), "fallocate", None)
    if reserve is not None:
        reserve(target, 0, ctypes.c_int64(0), ctypes.c_int64(size))  # where it fails, the file grows as it is written


def write_tensor(target: int, tensor: torch.Tensor, place: int, tell: Tell) -> None:
    """Write a tensor's bytes in the order of its elements."""
    flat = flat_bytes(tensor)
    view = raw_bytes(flat)
    for start in range(0, len(view), PIECE):
        piece = view[start : start + PIECE]
        _write(target, piece, place + start)
        tell(len(piece))


def _write(target: int, data: memoryview, place: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(target, data[done:], place + done)


def hashed(path: Path, tell: Tell) -> dict[str, int | str]:
    """The size and the SHA-256 of a file."""
    digest, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
            tell(count)
    return {"bytes": size, "sha256": digest.hexdigest()}


def hashed_at_last(path: Path, tell: Tell) -> dict[str, int | str]:
    """The size and the SHA-256 of a file that nobody here reads again. The system need not keep it in memory: what is
    written has room there then, which it would have to search for otherwise."""
    facts = hashed(path, tell)
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return facts


def equal_runs(left: OpenFiles, a: Placed, right: OpenFiles, b: Placed) -> bool:
    """Whether two tensors in files have the same bytes."""
    if a.kind.nbytes != b.kind.nbytes:
        return False
    buffers = [torch.empty(min(PIECE, a.kind.nbytes), dtype=torch.uint8) for _ in range(2)]
    for start in range(0, a.kind.nbytes, PIECE):
        parts = [buffer[: a.kind.nbytes - start] for buffer in buffers]
        for files, placed, part in ((left, a, parts[0]), (right, b, parts[1])):
            _read_part(files, placed, start, raw_bytes(part))
        if not torch.equal(*parts):
            return False
    return True


def equal_values(files: OpenFiles, placed: Placed, tensor: torch.Tensor) -> bool:
    """Whether a tensor in files has the same bytes as one in memory."""
    flat = flat_bytes(tensor)
    if len(flat) != placed.kind.nbytes:
        return False
    buffer = torch.empty(min(PIECE, len(flat)), dtype=torch.uint8)
    for start in range(0, len(flat), PIECE):
        part = buffer[: len(flat) - start]
        _read_part(files, placed, start, raw_bytes(part))
        if not torch.equal(part, flat[start : start + PIECE]):
            return False
    return True


def _read_part(files: OpenFiles, placed: Placed, start: int, into: memoryview) -> None:
    place, stop = 0, start + len(into)
    for extent in placed.extents or ():
        low, high = max(start, place), min(stop, place + extent.size)
        if low < high:
            files.read(Extent(extent.file, extent.start + low - place, high - low), into[low - start : high - start])
        place += extent.size


class Budget:
    """So many bytes may be in memory at once; one that needs more than all of them waits until it is alone."""

    def __init__(self, size: int) -> None:
        self._size, self._used, self._freed = size, 0, threading.Condition()

    def take(self, size: int) -> None:
        """Wait until there is room."""
        with self._freed:
            self._freed.wait_for(lambda: not self._used or self._used + size <= self._size)
            self._used += size

    def give_back(self, size: int) -> None:
        """Make room for others."""
        with self._freed:
            self._used -= size
            self._freed.notify_all()
