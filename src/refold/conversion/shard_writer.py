"""One file of a conversion: written, brought onto the disk and hashed; and checked by the way back."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from refold.conversion.byte_extents import Placed
from refold.conversion.checkpoint_folder import ShardFile
from refold.conversion.conversion_job import Job
from refold.conversion.file_bytes import (
    Budget,
    OpenFiles,
    Tell,
    equal_runs,
    equal_values,
    hashed,
    make_room,
    write_tensor,
)
from refold.conversion.tensor_plan import Group, move
from refold.errors import CheckFailed
from refold.weights import Tensors


@torch.no_grad()
def write_shard(job: Job, shard: ShardFile, folder: Path, budget: Budget, tell: Tell) -> dict[str, Any]:
    """Write a file; its size and hash, once it is on the disk."""
    path = folder / shard.name
    with OpenFiles(job.source.folder) as files, path.open("wb", buffering=0) as file:
        header = shard.header.encode()
        make_room(file.fileno(), shard.size)
        file.write(len(header).to_bytes(8, "little") + header)
        computed: dict[int, tuple[Group, list[str]]] = {}
        for name, (_, place) in shard.tensors.items():
            extents = job.made[name].extents
            if extents is None:
                group = job.owners[name]
                computed.setdefault(id(group), (group, []))[1].append(name)
                continue
            at = place.start
            for extent in extents:
                files.copy(extent, file.fileno(), at, tell)
                at += extent.size
        for group, names in computed.values():
            _write_computed(job, shard, group, names, files, file.fileno(), budget, tell)
        with ThreadPoolExecutor(1) as pool:
            synced = pool.submit(os.fsync, file.fileno())
            facts = hashed(path, lambda count: tell(0))  # while the disk is at work
            synced.result()
    return facts


def _write_computed(
    job: Job,
    shard: ShardFile,
    group: Group,
    names: list[str],
    files: OpenFiles,
    target: int,
    budget: Budget,
    tell: Tell,
) -> None:
    size = job.bytes_in(group)
    budget.take(size)
    try:
        state = _moved(group, {name: files.tensor(job.known[name]) for name in job.taken(group)}, back=job.back)
        for name in names:
            write_tensor(target, state.pop(name), shard.tensors[name][1].start, tell)
    finally:
        budget.give_back(size)


def _moved(group: Group, state: Tensors, *, back: bool) -> Tensors:
    for weight_map in reversed(group.maps) if back else group.maps:
        move(state, weight_map, back=back)
    return state


@torch.no_grad()
def check_group(job: Job, group: Group, folder: Path, budget: Budget, tell: Tell) -> None:
    """Take what a group of maps made, as it was written, back through the maps, and compare it with the source."""
    written = {name: entry for shard in job.shards.values() for name, entry in shard.tensors.items()}
    size = job.bytes_in(group)
    budget.take(size)
    try:
        with OpenFiles(folder) as results, OpenFiles(job.source.folder) as files:
            made = group.sources if job.back else group.targets
            state = {n: results.tensor(Placed(written[n][0], (written[n][1],))) for n in made}
            state = _moved(group, state, back=not job.back)
            for name in list(state):
                if not equal_values(files, job.known[name], state.pop(name)):
                    raise CheckFailed(f"{name} does not come back bit for bit from what was written.")
                tell(job.known[name].kind.nbytes)
    finally:
        budget.give_back(size)


def check_copies(job: Job, shard: ShardFile, folder: Path, tell: Tell) -> None:
    """Compare the tensors of a file that no map touched with the source's."""
    with OpenFiles(folder) as results, OpenFiles(job.source.folder) as files:
        for name, (kind, extent) in shard.tensors.items():
            if name in job.owners:
                continue
            if not equal_runs(results, Placed(kind, (extent,)), files, job.known[name]):
                raise CheckFailed(f"{name} was not copied bit for bit.")
            tell(kind.nbytes)
