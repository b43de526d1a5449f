"""A conversion before it begins: every file that will be there, and where each of its bytes comes from."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from refold.conversion.byte_extents import Placed, trace_group
from refold.conversion.checkpoint_folder import (
    PIECES,
    Checkpoint,
    Kind,
    ShardFile,
    made_header,
    parse_header,
    stored_order,
)
from refold.conversion.tensor_plan import Group, Plan
from refold.errors import WrongInput
from refold.saving.folder import plain_json

_NUMBERED = re.compile(r"(.*?)(\d+)(-of-)(\d+)(\.safetensors)")


@dataclass(frozen=True)
class Former:
    """The files from which a folder was converted: the way back makes these again, byte for byte."""

    headers: dict[str, str]
    index: tuple[str, str] | None


@dataclass(frozen=True)
class Job:
    """What is to be written. `back` takes a plan back that was applied before."""

    source: Checkpoint
    plan: Plan
    back: bool
    known: dict[str, Placed]
    """The tensors of the source."""
    made: dict[str, Placed]
    """The tensors of the result. Their extents lie in the source."""
    owners: dict[str, Group]
    """Of results of maps: the maps."""
    shards: dict[str, ShardFile]
    index: tuple[str, str] | None

    @classmethod
    def of(cls, source: Checkpoint, plan: Plan, *, back: bool = False, former: Former | None = None) -> Job:
        """The job of applying a plan to a checkpoint. What does not fit is an error, before anything is written."""
        known = {name: Placed(kind, (extent,)) for name, (kind, extent) in source.tensors().items()}
        plan.check_structural()
        made, owners, places = dict(known), dict[str, Group](), {n: e.file for n, (_, e) in source.tensors().items()}
        groups = plan.groups()
        for group in groups:
            results = trace_group(group, known, back=back)
            file = places[next(iter(group.targets if back else group.sources))]
            for name in group.targets if back else group.sources:
                del made[name], places[name]
            for name, placed in results.items():
                if name in made:
                    raise WrongInput(f"two tensors would have the name {name}. Nothing was written.")
                made[name], owners[name], places[name] = placed, group, file
        for name in plan.dropped:
            made.pop(name, None)
        shards, index = _shards(source, made, places, former)
        return cls(source, plan, back, known, made, owners, shards, index)

    @cached_property
    def identity(self) -> str:
        """Stands for all that decides which bytes are written: work that was begun for another job is of no use."""
        read = {f.name: [f.size, f.modified, f.header] for f in self.source.files.values()}
        written = {f.name: f.header for f in self.shards.values()}
        data = [self.plan.to_plain(), self.back, read, written, self.index, self.source.others]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def taken(self, group: Group) -> tuple[str, ...]:
        """The tensors that go into a group of maps."""
        return group.targets if self.back else group.sources

    def bytes_in(self, group: Group) -> int:
        """How large these are."""
        return sum(self.known[name].kind.nbytes for name in self.taken(group))

    def largest_group(self) -> int:
        """The most bytes that maps join to one thing."""
        return max((self.bytes_in(group) for group in self.owners.values()), default=0)

    @property
    def bytes_written(self) -> int:
        """The bytes of the new files."""
        return sum(file.size for file in self.shards.values())

    @property
    def bytes_read(self) -> int:
        """The bytes of the source's files."""
        return sum(file.size for file in self.source.files.values())


def _shards(
    source: Checkpoint, made: Mapping[str, Placed], places: Mapping[str, str], former: Former | None
) -> tuple[dict[str, ShardFile], tuple[str, str] | None]:
    held: dict[str, dict[str, Kind]] = {}
    before = _former_places(former)
    for name, placed in made.items():
        held.setdefault(before.get(name, places[name]), {})[name] = placed.kind
    names = _names(source, held) if former is None else {name: name for name in held}
    shards: dict[str, ShardFile] = {}
    for file in sorted(held):
        metadata = source.files[file].metadata if file in source.files else {"format": "pt"}
        header = _header(held[file], metadata, former.headers.get(file) if former else None)
        shards[names[file]] = shard_with(names[file], header)
    return shards, _index(source, shards, former)


def _names(source: Checkpoint, held: Iterable[str]) -> dict[str, str]:
    """New files have the names of those that their tensors come from, numbered anew where one came out empty."""
    kept = sorted(held)
    if len(kept) == len(source.files):
        return {name: name for name in kept}
    numbered = {name: _NUMBERED.fullmatch(name) for name in kept}
    names = {}
    for number, (name, match) in enumerate(numbered.items(), 1):
        digits = len(match[2]) if match else 0
        names[name] = f"{match[1]}{number:0{digits}}-of-{len(kept):0{digits}}{match[5]}" if match else name
    return names


def _header(tensors: Mapping[str, Kind], metadata: Mapping[str, str] | None, former: str | None) -> str:
    """The former file's own header, if it says the same as one made anew would; else one made anew."""
    if former is not None:
        data = json.loads(former)
        metadata = data.pop("__metadata__", None)
        if {name: Kind(facts["dtype"], tuple(facts["shape"])) for name, facts in data.items()} == tensors:
            return former
    kept = None if metadata is None else {name: text for name, text in metadata.items() if name != PIECES}
    return made_header(stored_order(tensors), kept)


def shard_with(name: str, header: str) -> ShardFile:
    """The file that a header describes."""
    metadata, tensors = parse_header(header, name, name)
    size = 8 + len(header.encode()) + sum(extent.size for _, extent in tensors.values())
    return ShardFile(name, size, 0, header, metadata, tensors)


def _former_places(former: Former | None) -> dict[str, str]:
    headers = former.headers.items() if former else ()
    return {name: file for file, header in headers for name in json.loads(header) if name != "__metadata__"}


def _index(source: Checkpoint, shards: Mapping[str, ShardFile], former: Former | None) -> tuple[str, str] | None:
    told = former.index if former else source.index
    if told is None:
        return None
    name, text = told
    data = json.loads(text)
    placed = {tensor: file.name for file in shards.values() for tensor in file.tensors}
    if (
        former is not None
        and data["weight_map"] == placed
        and all(file.header == former.headers.get(file.name) for file in shards.values())
    ):
        return told
    total = sum(kind.nbytes for file in shards.values() for kind, _ in file.tensors.values())
    facts = data.get("metadata")
    metadata = {**(facts if isinstance(facts, dict) else {}), "total_size": total}
    return name, plain_json({"metadata": metadata, "weight_map": dict(sorted(placed.items()))}).decode() + "\n"
