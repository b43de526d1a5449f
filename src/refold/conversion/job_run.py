"""A conversion done: its pieces of work divided among processes and threads, each noted when it is on the disk."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from refold.conversion.checkpoint_folder import MANIFEST, read_object
from refold.conversion.conversion_job import Job
from refold.conversion.file_bytes import Budget, Stopped, Tell, hashed, hashed_at_last
from refold.conversion.ranks import Ranks
from refold.conversion.shard_writer import check_copies, check_group, write_shard
from refold.conversion.work_folder import WorkFolder
from refold.errors import CheckFailed, SaveError, WrongInput
from refold.saving.folder import plain_json, write_bytes

Advance = Callable[[int, int], None]
"""Called with the bytes that are done and with all there are."""
Hash = Callable[[Path, Tell], dict[str, Any]]
"""Tells the size and the hash of a file."""


@dataclass(frozen=True)
class Checksums:
    """The size and hash of every file."""

    source: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Piece:
    """A piece of work: done by whoever has it, and noted under its name."""

    kind: str
    name: str
    size: int
    work: Callable[[Tell], dict[str, Any] | None]


def run_job(
    job: Job, result: Path, told: dict[str, Any], ranks: Ranks, *, verify: bool, jobs: int, advance: Advance
) -> tuple[Checksums, bool]:
    """Do a conversion; the checksums of all files, and whether it was there already. `told` goes into the manifest.
    Every process takes the same steps; the leading one holds the folder, and gives the result its name."""
    work = WorkFolder(result)
    with ranks.together():
        check_place(job.source.folder, result)
        there = (result / MANIFEST).exists()
    sums = Checksums()
    if there:
        with ranks.together():
            sums = _found(job, result, told, work) if ranks.leads else sums
        return sums, True
    with ExitStack() as stack:
        with ranks.together():
            if ranks.leads and not stack.enter_context(work.open(job.identity)):
                _check_room(job, work)
        _done_by_all(job, work, ranks, verify=verify, jobs=jobs, advance=advance)
        with ranks.together(), work.telling():
            if ranks.leads:
                sums = _noted(job, work)
                work.finish(plain_json(told | {"source": sums.source, "result": sums.result}))
    return sums, False


def _done_by_all(job: Job, work: WorkFolder, ranks: Ranks, *, verify: bool, jobs: int, advance: Advance) -> None:
    budget = Budget(job.largest_group())
    read_again = verify or ranks.count > 1
    rounds = [_pieces(job, work, budget, hashed if read_again else hashed_at_last)]
    rounds += [_checks(job, work, budget)] if verify else []
    mine = [[pieces[i] for i in ranks.share([piece.size for piece in pieces])] for pieces in rounds]
    left = [[piece for piece in pieces if work.facts(piece.kind, piece.name) is None] for pieces in mine]
    total, open_ = (sum(piece.size for pieces in rounds for piece in pieces) for rounds in (mine, left))
    counter = _Counter(total - open_, total, advance)
    for pieces in left:
        with ranks.together(), work.telling():
            _do(pieces, work, jobs, counter)
    with ranks.together():
        _check_unchanged(job)


def _pieces(job: Job, work: WorkFolder, budget: Budget, hash_source: Hash) -> list[_Piece]:
    """Every file to be written, each followed by the source's file that it comes from, which is in memory then."""
    written = [
        _Piece("shard", s.name, s.size, partial(write_shard, job, s, work.path, budget)) for s in job.shards.values()
    ]
    folder = job.source.folder
    read = [_Piece("source", f.name, f.size, partial(hash_source, folder / f.name)) for f in job.source.files.values()]
    others = [
        _Piece("other", name, (folder / name).stat().st_size, partial(_copy, folder / name, work.path / name))
        for name in job.source.others
    ]
    pairs = [piece for pair in zip(written, read, strict=False) for piece in pair]
    return [*pairs, *written[len(read) :], *read[len(written) :], *others]


def _copy(source: Path, target: Path, tell: Tell) -> dict[str, Any]:
    shutil.copyfile(source, target)
    with target.open("rb+") as file:
        os.fsync(file.fileno())
    return hashed(target, tell)


def _checks(job: Job, work: WorkFolder, budget: Budget) -> list[_Piece]:
    groups = {id(group): group for group in job.owners.values()}
    checks = [
        _Piece("check", f"group-{i}", job.bytes_in(group), partial(check_group, job, group, work.path, budget))
        for i, group in enumerate(groups.values())
    ]
    for shard in job.shards.values():
        size = sum(kind.nbytes for name, (kind, _) in shard.tensors.items() if name not in job.owners)
        checks.append(_Piece("check", shard.name, size, partial(check_copies, job, shard, work.path)))
    return checks


class _Counter:
    """Bytes that are done, counted by several threads; it stops them all when one has failed."""

    def __init__(self, done: int, total: int, advance: Advance) -> None:
        self._done, self._total, self._advance = done, total, advance
        self._lock, self.stopped = threading.Lock(), False

    def __call__(self, count: int) -> None:
        if self.stopped:
            raise Stopped
        with self._lock:
            self._done += count
            self._advance(min(self._done, self._total), self._total)


def _do(pieces: Iterable[_Piece], work: WorkFolder, jobs: int, counter: _Counter) -> None:
    """Do pieces of work, several at once; the first failure ends all of them."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(_do_one, piece, work, counter) for piece in pieces]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            failed = any(f.done() and not f.cancelled() and f.exception() for f in futures)
            counter.stopped = failed or not all(f.done() for f in futures)
            for future in futures:
                future.cancel()
    errors = [f.exception() for f in futures if not f.cancelled() and f.exception()]
    for error in sorted(errors, key=lambda e: isinstance(e, Stopped)):
        assert error is not None
        raise error


def _do_one(piece: _Piece, work: WorkFolder, counter: _Counter) -> None:
    facts = piece.work(counter)
    if facts is not None:
        work.note(piece.kind, piece.name, facts)


def _noted(job: Job, work: WorkFolder) -> Checksums:
    """What was noted of every file, after the index was written, which is made last."""

    def facts(kind: str, names: Iterable[str]) -> dict[str, Any]:
        return {name: work.facts(kind, name) for name in names}

    others = facts("other", job.source.others)
    sums = Checksums(facts("source", job.source.files) | others, facts("shard", job.shards) | others)
    if job.source.index is not None:
        sums.source[job.source.index[0]] = _text_facts(job.source.index[1].encode())
    if job.index is not None:
        write_bytes(work.path / job.index[0], job.index[1].encode())
        sums.result[job.index[0]] = _text_facts(job.index[1].encode())
    return sums


def _text_facts(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


# --- before and after ----------------------------------------------------------------------------------------------


def check_place(source: Path, result: Path) -> None:
    """Refuse to write over anything."""
    place, origin = result.resolve(), source.resolve()
    if place == origin or origin in place.parents or place in origin.parents:
        raise WrongInput(f"{result} and {source} lie inside one another: write the result elsewhere.")
    if result.is_symlink() or (result.exists() and not result.is_dir()):
        raise WrongInput(f"{result} is a file or a symbolic link; give the name of a new folder.")
    if result.is_dir() and any(result.iterdir()) and not (result / MANIFEST).exists():
        raise WrongInput(f"{result} holds files already; give the name of a new folder.")


def _check_room(job: Job, work: WorkFolder) -> None:
    free = shutil.disk_usage(work.path).free
    if free < job.bytes_written:
        work.discard()
        raise SaveError(
            f"{work.result} needs {job.bytes_written:,} bytes, and {free:,} are free there. Nothing was written."
        )


def _check_unchanged(job: Job) -> None:
    for file in job.source.files.values():
        now = (job.source.folder / file.name).stat()
        if (now.st_size, now.st_mtime_ns) != (file.size, file.modified):
            raise WrongInput(f"{job.source.folder / file.name} was written to while it was read. Convert it again.")


def _found(job: Job, result: Path, told: dict[str, Any], work: WorkFolder) -> Checksums:
    """The result, if it is the one that this job would make; its files and the source's are hashed again."""
    manifest = read_object(result / MANIFEST)
    sums = Checksums(manifest.get("source", {}), manifest.get("result", {}))
    if any(manifest.get(key) != value for key, value in told.items()):
        raise WrongInput(f"{result} holds another conversion; give the name of a new folder.")
    for folder, files in ((job.source.folder, sums.source), (result, sums.result)):
        for name, facts in files.items():
            if not (folder / name).is_file() or hashed(folder / name, lambda count: None) != facts:
                raise CheckFailed(f"{folder / name} is not what {result / MANIFEST} says: give another folder.")
    work.discard()
    return sums
