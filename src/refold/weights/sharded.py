"""Weight maps on sharded tensors (DTensors): each rank computes with its own shards where the map allows it, else with
tensors that are gathered for the one map. All ranks of a mesh make the same calls, as everywhere in torch.distributed.

This is the one file that knows DTensor. It loads torch.distributed.tensor only where there is such a tensor already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from refold.fingerprint import is_sharded
from refold.weights.map_operation import OnShards, Operation, Tensors

Placements = tuple[Any, ...]
_LEADING = ("weight", "0", "whole")
"""The roles of the tensor after whose placement a map is divided."""


@dataclass(frozen=True)
class Layout:
    """Where a tensor lies: its mesh, and the placement on each dimension of it."""

    mesh: Any
    placements: Placements


def layout_of(tensor: Any) -> Layout | None:
    """Where a sharded tensor lies; None for one that is no DTensor."""
    return Layout(tensor.device_mesh, tuple(tensor.placements)) if is_sharded(tensor) else None


def lay_out(tensor: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    """A tensor (whole on every rank, or sharded) as one that lies like this; None: whole on every rank."""
    if layout == layout_of(tensor):
        return tensor
    given: Any = tensor.detach()
    if layout is None or (is_sharded(given) and given.device_mesh != layout.mesh):
        given = given.full_tensor()
    if layout is None:
        return given
    if not is_sharded(given):
        given = _assembled(given, layout.mesh, _whole(layout.mesh), given.shape)
    placed: torch.Tensor = given.redistribute(layout.mesh, layout.placements)
    return placed


def parts_along(tensor: torch.Tensor, axis: int) -> int:
    """Into how many parts a tensor is cut along an axis."""
    layout, count = layout_of(tensor), 1
    for place, placement in enumerate(layout.placements if layout else ()):
        count *= layout.mesh.size(place) if layout and placement.is_shard(axis) else 1
    return count


def largest(tensor: Any) -> float:
    """The largest magnitude in a tensor, whichever rank holds it."""
    if not is_sharded(tensor):
        return float(tensor.detach().abs().max())
    local = tensor.detach().to_local()
    found = local.abs().max().double() if local.numel() else local.new_zeros((), dtype=torch.float64)
    return float(_maximum(found, tensor.device_mesh))


def _maximum(values: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Number by number, the largest of all ranks."""
    for place in range(mesh.ndim):
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, mesh.get_group(place))
    return values


@dataclass(frozen=True)
class Part:
    """One tensor of a map: its shape, where it lies between maps (None: whole on every rank), and how it is cut while
    the map runs."""

    shape: torch.Size
    lies: Layout | None
    cut: Layout

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank computes with."""
        cut: Any = lay_out(tensor.detach(), self.cut)
        found: torch.Tensor = cut.to_local()
        return found.contiguous()

    def assembled(self, local: torch.Tensor) -> torch.Tensor:
        """The tensor from what every rank computed, lying as it does between maps; with memory of its own."""
        local = local.contiguous()
        if local.untyped_storage().nbytes() > local.numel() * local.element_size():
            local = local.clone()
        return lay_out(_assembled(local, self.cut.mesh, self.cut.placements, self.shape), self.lies)

    def without_numbers(self, dtype: torch.dtype) -> torch.Tensor:
        """The tensor on the meta device."""
        return lay_out(torch.empty(self.shape, dtype=dtype, device="meta"), self.lies)


@dataclass(frozen=True)
class Sharding:
    """How one map runs on shards: by which operation on each rank, and with which parts of its tensors."""

    operation: Operation
    sources: dict[str, Part]
    targets: dict[str, Part]

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        return self  # a copy of a mesh is another mesh to torch

    @property
    def mesh(self) -> Any:
        """The mesh of all ranks that hold a part."""
        return next(iter(self.sources.values())).cut.mesh

    def gathered(self, operation: Operation) -> Sharding:
        """The same map on whole tensors on every rank: for what must be summed over shards."""
        sides = ({r: _uncut(part) for r, part in side.items()} for side in (self.sources, self.targets))
        return Sharding(operation, *sides)

    def on_any_rank(self, flags: Iterable[bool]) -> list[bool]:
        """For each question, whether the answer is yes on any rank, so that all ranks go on alike."""
        answers = torch.tensor([*map(int, flags)], device=self.mesh.device_type)
        return [bool(answer) for answer in _maximum(answers, self.mesh).tolist()]


def local_parts(parts: Mapping[str, Part], tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """What this rank computes with, by role."""
    return {role: parts[role].local(tensor) for role, tensor in tensors.items()}


def assembled_parts(parts: Mapping[str, Part], tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The tensors from what every rank computed, by role."""
    return {role: parts[role].assembled(tensor) for role, tensor in tensors.items()}


# --- how a map is divided ------------------------------------------------------------------------------------------


def plan_forward(operation: Operation, old: Mapping[str, torch.Tensor]) -> Sharding | None:
    """How a map runs on these sources, and where its targets lie then; None where none of them is sharded."""
    mesh = _mesh_of(old.values())
    if mesh is None:
        return None
    shapes = {role: tensor.shape for role, tensor in old.items()}
    lead = old[_leading(old)]
    placements = _placements(lead, mesh)
    divided = _divided(operation, placements, mesh, lead.dim(), lambda rule, axis: axis)
    made = operation.forward({r: torch.empty(t.shape, dtype=t.dtype, device="meta") for r, t in old.items()})
    cuts = {role: divided.target(role) for role in made}
    lies = {r: _merged(cuts[r], placements, divided.rules, tensor.dim()) for r, tensor in made.items()}
    sources = {r: Part(shapes[r], layout_of(t), Layout(mesh, divided.source(r))) for r, t in old.items()}
    targets = {r: Part(t.shape, Layout(mesh, lies[r]), Layout(mesh, cuts[r])) for r, t in made.items()}
    return Sharding(divided.operation, sources, targets)


def plan_back(operation: Operation, specs: Mapping[str, Any], current: Mapping[str, torch.Tensor]) -> Sharding | None:
    """How the inverse of a map runs whose targets were sharded after it was applied, and where its sources lie then:
    parameters like the targets, buffers whole on every rank. None where no target is sharded."""
    mesh = _mesh_of(current.values())
    if mesh is None or not specs:
        return None
    lead = _leading(current)
    placements, dims = _placements(current[lead], mesh), len(specs[_leading(specs)].shape)

    def source_axis(rule: Callable[[int], OnShards | None], axis: int) -> int | None:
        found = {place: rule(place) for place in range(dims)}
        return next((place for place, on in found.items() if on and on.targets.get(lead) == axis), None)

    whole = _Divided(operation, (None,) * len(placements))
    divided = _divided(operation, placements, mesh, dims, source_axis) if operation.structural else whole
    sources = {}
    for role, spec in specs.items():
        cut = divided.source(role)
        lies = Layout(mesh, _merged(cut, placements, divided.rules, len(spec.shape))) if spec.is_parameter else None
        sources[role] = Part(torch.Size(spec.shape), lies, Layout(mesh, cut))
    targets = {r: Part(t.shape, layout_of(t), Layout(mesh, divided.target(r))) for r, t in current.items()}
    return Sharding(divided.operation, sources, targets)


@dataclass(frozen=True)
class _Divided:
    """The operation of each rank, and for each dimension of the mesh the rule by which it is divided there, if any."""

    operation: Operation
    rules: tuple[OnShards | None, ...]

    def source(self, role: str) -> Placements:
        return tuple(_placement(rule.sources.get(role) if rule else None) for rule in self.rules)

    def target(self, role: str) -> Placements:
        return tuple(_placement(rule.targets.get(role) if rule else None) for rule in self.rules)


def _divided(
    operation: Operation,
    placements: Placements,
    mesh: Any,
    dims: int,
    source_axis: Callable[[Callable[[int], OnShards | None], int], int | None],
) -> _Divided:
    """Divide a map along one dimension of the mesh after the other."""
    rules: list[OnShards | None] = []
    for place, placement in enumerate(placements):
        known, parts = operation, mesh.size(place)

        def rule(axis: int, known: Operation = known, parts: int = parts) -> OnShards | None:
            return known.on_shards(axis, parts, dims)

        axis = source_axis(rule, placement.dim) if _is_plain_shard(placement) else None
        rules.append(None if axis is None else rule(axis))
        operation = operation if rules[-1] is None else rules[-1].operation
    return _Divided(operation, tuple(rules))


def _merged(cut: Placements, lead: Placements, rules: tuple[OnShards | None, ...], dims: int) -> Placements:
    """Where a tensor lies that a map gives: as it was cut, or like the leading tensor where it was not."""
    return tuple(
        mine if rule or not _is_plain_shard(theirs) or theirs.dim >= dims else theirs
        for mine, theirs, rule in zip(cut, lead, rules, strict=True)
    )


def _leading(tensors: Mapping[str, Any]) -> str:
    return next((role for role in _LEADING if role in tensors), next(iter(tensors)))


def _mesh_of(tensors: Iterable[Any]) -> Any:
    return next((t.device_mesh for t in tensors if is_sharded(t)), None)


def _placements(tensor: torch.Tensor, mesh: Any) -> Placements:
    layout = layout_of(tensor)
    return layout.placements if layout and layout.mesh == mesh else _whole(mesh)


def _is_plain_shard(placement: Any) -> bool:
    from torch.distributed.tensor import Shard

    return type(placement) is Shard


def _placement(axis: int | None) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    return Replicate() if axis is None else Shard(axis)


def _whole(mesh: Any) -> Placements:
    return (_placement(None),) * mesh.ndim


def _uncut(part: Part) -> Part:
    return Part(part.shape, part.lies, Layout(part.cut.mesh, _whole(part.cut.mesh)))


def _assembled(local: torch.Tensor, mesh: Any, placements: Placements, shape: torch.Size) -> Any:
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
