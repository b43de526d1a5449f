"""`convert`: a checkpoint from one layout into another, as a stream of tensors; and back again, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refold.conversion.checkpoint_folder import MANIFEST, Checkpoint, Kind, read_checkpoint
from refold.conversion.conversion_job import Job
from refold.conversion.conversion_manifest import Manifest, manifest_of, read_manifest
from refold.conversion.job_run import Advance, Checksums, run_job
from refold.conversion.layout_tables import PLAIN, layout_named
from refold.conversion.ranks import Ranks, joined_ranks
from refold.conversion.row_matching import match_layout
from refold.conversion.tensor_plan import Plan
from refold.errors import WrongInput

_PLANNED = "plan"
"""What a manifest calls the layout of a plan that was given."""


@dataclass(frozen=True)
class Conversion:
    """What was converted. Every process that took part has one; checksums are with the leading one."""

    plan: Plan
    back: bool
    origin: str
    to: str
    passed: tuple[str, ...]
    """Tensors that stay as they are, because nothing names them."""
    incomplete: dict[str, str]
    """Of these, the ones that a row would take if others were there, or that their layer leaves behind; and why."""
    left_out: tuple[str, ...]
    """Files and folders of the source that do not go along."""
    bytes_written: int
    largest_group: int
    verified: bool
    ranks: Ranks = field(default_factory=Ranks)
    checksums: Checksums = field(default_factory=Checksums)
    was_there: bool = False
    same_as_original: bool | None = None
    """Of a way back: whether every file of the original is there again, byte for byte."""


@dataclass(frozen=True)
class _Route:
    """A plan for a checkpoint, and where it leads."""

    plan: Plan
    origin: str
    to: str
    back: bool = False
    passed: tuple[str, ...] | None = None
    incomplete: dict[str, str] = field(default_factory=dict)
    manifest: Manifest | None = None
    """Of a way back: what the folder says of where it comes from."""


def convert(
    source: str | Path,
    out: str | Path,
    *,
    to: str | None = None,
    origin: str | None = None,
    plan: Plan | None = None,
    original: bool = False,
    verify: bool = False,
    jobs: int = 4,
    advance: Advance = lambda done, total: None,
) -> Conversion:
    """Convert the safetensors files of a folder into a new folder: into a layout (a name, or a YAML file), by a plan,
    or, with `original`, back to what a converted folder was made from.

    `origin` names the layout of the source where the folder does not say it. `jobs` files are written at once. Started
    again after it was stopped, it goes on from what is done. Under torchrun the files are divided among the processes.
    """
    with joined_ranks() as ranks:
        with ranks.together():
            checkpoint = read_checkpoint(Path(source))
            route = _route(checkpoint, to, origin, plan, original)
            former = route.manifest.former if route.manifest else None
            job = Job.of(checkpoint, route.plan, back=route.back, former=former)
        passed = tuple(name for name in job.known if name in job.made and name not in job.owners)
        told = manifest_of(job, route.origin, route.to, passed)
        sums, there = run_job(job, Path(out), told, ranks, verify=verify, jobs=jobs, advance=advance)
    return Conversion(
        route.plan,
        route.back,
        route.origin,
        route.to,
        passed,
        route.incomplete,
        checkpoint.left_out,
        job.bytes_written,
        job.largest_group(),
        verify and not there,
        ranks,
        sums,
        there,
        _same(route.manifest, sums) if ranks.leads else None,
    )


def _route(source: Checkpoint, to: str | None, origin: str | None, plan: Plan | None, original: bool) -> _Route:
    if sum([plan is not None, to is not None, original]) != 1:
        raise WrongInput("Say where to convert to in one way: a layout, a plan, or back to the original.")
    if plan is not None:
        return _Route(plan, origin or PLAIN, _PLANNED)
    manifest = read_manifest(source.folder) if origin is None else None
    if original or (manifest is not None and to == manifest.origin):
        if manifest is None:
            raise WrongInput(f"{source.folder} does not say what it was converted from: it has no {MANIFEST}.")
        return _Route(manifest.plan, manifest.to, manifest.origin, not manifest.back, manifest=manifest)
    assert to is not None
    if manifest is not None and manifest.to != PLAIN:
        raise WrongInput(
            f"{source.folder} is in the layout {manifest.to}, and tables lead from {PLAIN} and back: convert it to "
            f"{manifest.origin} first."
        )
    kinds, config = {name: kind for name, (kind, _) in source.tensors().items()}, source.config()
    return _by_tables(kinds, config, origin or PLAIN, to)


def _by_tables(kinds: Mapping[str, Kind], config: Mapping[str, Any], origin: str, to: str) -> _Route:
    tables = layout_named(origin), layout_named(to)
    if tables[0].name == tables[1].name:
        raise WrongInput(f"The layout is {to} before and after. --from says which layout a folder is in.")
    if tables[0].rows and tables[1].rows:
        raise WrongInput(f"Tables lead from {PLAIN} and back: convert {origin} to {PLAIN} first, then to {to}.")
    layout = tables[1] if tables[1].rows or not tables[0].rows else tables[0].inverted()
    found = match_layout(layout, kinds, config)
    return _Route(found.plan, tables[0].name, tables[1].name, incomplete=found.incomplete)


def _same(manifest: Manifest | None, sums: Checksums) -> bool | None:
    return None if manifest is None else manifest.source == sums.result
