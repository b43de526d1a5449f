"""Where the bytes of a plan's results lie in the source: joining rows, splitting them and reshaping move no byte within
its run, so such results are copied from file to file, and no tensor of them is ever in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from refold.conversion.checkpoint_folder import BITS, Extent, Kind
from refold.conversion.shape_trial import DoesNotFit, tried
from refold.conversion.tensor_plan import Group
from refold.errors import WrongInput
from refold.weights import Concatenate, Operation, Pad, Rename, Reshape, Slice
from refold.weights.maps import WeightMap
from refold.wording import one_line

_INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


@dataclass(frozen=True)
class Placed:
    """A tensor, and the runs of bytes that are its values one after the other; None where it must be computed."""

    kind: Kind
    extents: tuple[Extent, ...] | None


def integer_dtype(kind: Kind) -> torch.dtype:
    """The integers as wide as a tensor's elements: maps that only move numbers need not know what they mean, and so no
    NaN and no number format of tomorrow loses a bit."""
    return _INTEGERS[BITS[kind.dtype]]


def trace_group(group: Group, known: Mapping[str, Placed], *, back: bool) -> dict[str, Placed]:
    """What the maps of a group make of tensors in files, or, `back`, of what they once made."""
    taken = group.targets if back else group.sources
    missing = next((name for name in taken if name not in known), None)
    if missing is not None:
        raise WrongInput(f"{missing} is missing: {group.maps[-1]} needs it.")
    state = {name: known[name] for name in taken}
    packed = next((name for name, placed in state.items() if BITS[placed.kind.dtype] not in _INTEGERS), None)
    if packed is not None:
        raise WrongInput(
            f"{packed} is {state[packed].kind.dtype}, several elements to a byte: such a tensor can only stay "
            f"as it is, so leave it out of the rows."
        )
    for weight_map in reversed(group.maps) if back else group.maps:
        _trace(state, weight_map, back)
    return state


def _trace(state: dict[str, Placed], weight_map: WeightMap, back: bool) -> None:
    taken, made = (weight_map.targets, weight_map.sources) if back else (weight_map.sources, weight_map.targets)
    given = {role: state.pop(name) for role, name in taken.items()}
    dtypes = {placed.kind.dtype for placed in given.values()}
    if len(dtypes) > 1:
        raise WrongInput(f"{', '.join(taken.values())} have different dtypes ({', '.join(sorted(dtypes))}).")
    kinds = _kinds(weight_map, given, back)
    runs = _runs(weight_map.operation, given, kinds, back)
    state |= {made[role]: Placed(kind, runs.get(role)) for role, kind in kinds.items()}


def _kinds(weight_map: WeightMap, given: Mapping[str, Placed], back: bool) -> dict[str, Kind]:
    """What comes out of a map, which is tried on tensors without numbers."""
    dtype = next((placed.kind.dtype for placed in given.values()), "F32")
    meta = {r: torch.empty(p.kind.shape, dtype=integer_dtype(p.kind), device="meta") for r, p in given.items()}
    try:
        found = tried(weight_map.operation, meta, back=back)
    except DoesNotFit as error:
        shapes = ", ".join(f"{name} {given[role].kind}" for role, name in _names(weight_map, back).items())
        raise WrongInput(f"{weight_map.operation} does not fit {shapes}: {one_line(error, 200)}.") from None
    return {role: Kind(dtype, tuple(tensor.shape)) for role, tensor in found.items()}


def _names(weight_map: WeightMap, back: bool) -> dict[str, str]:
    return weight_map.targets if back else weight_map.sources


def _runs(
    operation: Operation, given: Mapping[str, Placed], made: Mapping[str, Kind], back: bool
) -> dict[str, tuple[Extent, ...]]:
    """The runs of bytes of what a map makes, for those of its results that are runs of what it is given."""
    flat = [placed.extents for _, placed in sorted(given.items(), key=lambda item: item[0].zfill(9))]
    if not flat or any(extents is None for extents in flat) or not _moves_rows(operation, given):
        return {}
    whole = [extent for extents in flat for extent in extents or ()]
    found: dict[str, tuple[Extent, ...]] = {}
    for role, kind in sorted(made.items(), key=lambda item: item[0].zfill(9)):
        whole += [Extent("", 0, kind.nbytes)] if isinstance(operation, Pad) and not back else []
        taken, whole = _cut(whole, kind.nbytes)
        found[role] = tuple(taken)
    return found


def _moves_rows(operation: Operation, given: Mapping[str, Placed]) -> bool:
    if isinstance(operation, Reshape | Rename):
        return True
    dims = {len(placed.kind.shape) for placed in given.values()}
    return isinstance(operation, Concatenate | Slice | Pad) and all(operation.dim in (0, -dim) for dim in dims)


def _cut(extents: Iterable[Extent], size: int) -> tuple[list[Extent], list[Extent]]:
    """The first so many bytes of some runs, and the rest."""
    first: list[Extent] = []
    rest: list[Extent] = []
    for extent in extents:
        take = min(extent.size, size)
        if take:
            first.append(replace(extent, size=take))
        if take < extent.size:
            rest.append(replace(extent, start=extent.start + take, size=extent.size - take))
        size -= take
    return first, rest
