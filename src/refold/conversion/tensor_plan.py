"""A plan: which tensor comes from which, by which map. Plain data over names, for tensors that lie anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from refold.errors import CheckpointMismatch, WrongInput
from refold.saving.folder import plain_json, replace_file
from refold.weights import Operation, Tensors
from refold.weights.maps import WeightMap

FORMAT = "refold-plan"
VERSION = 1
_LAYER = re.compile(r"((?:[^.]*[^.\d][^.]*\.)*)(\d+)\.")
_MOST_NAMES, _MOST_SIGNS = 6, 80


@dataclass(frozen=True)
class Group:
    """Maps that hang together: what goes into them, and what comes out."""

    maps: tuple[WeightMap, ...]
    sources: tuple[str, ...]
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """Weight maps in the order in which they are applied. Tensors that none of them names stay as they are."""

    maps: tuple[WeightMap, ...]
    dropped: tuple[str, ...] = ()
    """Tensors that are left out, and that no map gives back."""

    def __str__(self) -> str:
        """One line a map; those that differ in the number of a layer alone are one line together."""
        found: dict[str, list[str]] = {}
        for weight_map in self.maps:
            layer = _LAYER.match(next(iter(weight_map.targets.values()), ""))
            line = _line(weight_map)
            if layer is not None:
                line = line.replace(f"{layer[1]}{layer[2]}.", f"{layer[1]}*.")
            found.setdefault(line, []).append(layer[2] if layer else "")
        lines = [line if not n[0] else f"{line}   (* = {_ranges(n)})" for line, n in found.items()]
        return "\n".join([*lines, *(f"left out: {name}" for name in self.dropped)]) or "nothing is changed"

    # --- as data ---------------------------------------------------------------------------------------------------

    def to_plain(self) -> dict[str, Any]:
        """JSON-able data; `Plan.from_plain` is its inverse."""
        maps = [{**m.operation.settings(), "sources": m.sources, "targets": m.targets} for m in self.maps]
        return {"format": FORMAT, "version": VERSION, "maps": maps, "dropped": list(self.dropped)}

    @classmethod
    def from_plain(cls, data: Any) -> Plan:
        """A plan from data of unknown origin, so everything is checked."""
        if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
            raise WrongInput(f"this is no plan that this Refold reads (format {FORMAT}, version {VERSION}).")
        try:
            dropped = data["dropped"]
            if not isinstance(dropped, list) or not all(isinstance(name, str) for name in dropped):
                raise ValueError("dropped must be a list of names")
            return cls(tuple(_map_from(entry) for entry in data["maps"]), tuple(dropped))
        except (KeyError, TypeError, ValueError) as error:
            raise WrongInput(f"the plan is damaged: {type(error).__name__}: {error}.") from None

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON, whole or not at all."""
        place = Path(path)
        replace_file(place, plain_json(self.to_plain()).decode())
        return place

    # --- on tensors ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """The tensors that the plan makes of these, with those that it does not name."""
        state = dict(tensors)
        for weight_map in self.maps:
            move(state, weight_map, back=False)
        for name in self.dropped:
            state.pop(name, None)
        return state

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor]) -> Tensors:
        """The tensors from which the plan made these. Maps that compute with numbers need what was recorded when they
        were applied, so a plan alone cannot take them back."""
        self.check_structural()
        if self.dropped:
            raise CheckpointMismatch(f"the plan left out {self.dropped[0]}, and nothing gives it back.")
        state = dict(tensors)
        for weight_map in reversed(self.maps):
            move(state, weight_map, back=True)
        return state

    def check_structural(self) -> None:
        """Refuse where the way back needs more than the tensors themselves."""
        computed = next((m for m in self.maps if not m.operation.structural), None)
        if computed is not None:
            raise CheckpointMismatch(
                f"{computed} computes with numbers and rounds them, so its inverse needs the correction that is "
                f"recorded when a model is rewritten: rewrite and save the model itself (refold optimize, refold.save)."
            )

    def groups(self) -> list[Group]:
        """The maps in groups that share no tensor, in order."""
        owner: dict[str, int] = {}
        members: dict[int, list[WeightMap]] = {}
        for number, weight_map in enumerate(self.maps):
            joined = {owner.pop(name) for name in weight_map.sources.values() if name in owner}
            first = min(joined, default=number)
            moved = sorted(joined - {first})
            members[first] = [*members.get(first, []), *(m for k in moved for m in members.pop(k)), weight_map]
            owner = {name: first if k in moved else k for name, k in owner.items()} if moved else owner
            owner |= dict.fromkeys(weight_map.targets.values(), first)
        return [_group(maps) for _, maps in sorted(members.items())]


def read_plan(path: Path) -> Plan:
    """The plan in a file."""
    from refold.conversion.checkpoint_folder import read_object

    data = read_object(path)
    try:
        return Plan.from_plain(data)
    except WrongInput as reason:
        raise WrongInput(f"{path}: {reason}") from None


def move(state: Tensors, weight_map: WeightMap, *, back: bool) -> None:
    """Put the tensors on one side of a map in the place of those on the other."""
    taken, made = (weight_map.targets, weight_map.sources) if back else (weight_map.sources, weight_map.targets)
    missing = next((name for name in taken.values() if name not in state), None)
    if missing is not None:
        raise CheckpointMismatch(f"{missing} is missing, and {weight_map} needs it.")
    given = {role: state.pop(name) for role, name in taken.items()}
    found = weight_map.operation.inverse(given, {}) if back else weight_map.operation.forward(given)
    if not back and not found and made:
        raise CheckpointMismatch(f"{weight_map} does not say which numbers it has: it was computed from values.")
    twice = next((name for name in made.values() if name in state), None)
    if twice is not None:
        raise CheckpointMismatch(f"{twice} is there already, and {weight_map} makes it.")
    state |= {made[role]: value for role, value in found.items()}


def _group(maps: list[WeightMap]) -> Group:
    inside: dict[str, None] = {}
    sources: dict[str, None] = {}
    for weight_map in maps:
        for name in weight_map.sources.values():
            if name in inside:
                del inside[name]
            else:
                sources[name] = None
        inside |= dict.fromkeys(weight_map.targets.values())
    return Group(tuple(maps), tuple(sources), tuple(inside))


def _map_from(entry: Mapping[str, Any]) -> WeightMap:
    names = [entry["sources"], entry["targets"]]
    for roles in names:
        if not isinstance(roles, dict) or not all(isinstance(n, str) for pair in roles.items() for n in pair):
            raise ValueError("sources and targets must give a name to each role")
    rest = {key: value for key, value in entry.items() if key not in ("sources", "targets")}
    return WeightMap(Operation.from_settings(rest), dict(names[0]), dict(names[1]))


def _line(weight_map: WeightMap) -> str:
    made, taken = _shortened([*weight_map.targets.values()]), _shortened([*weight_map.sources.values()])
    how = str(weight_map.operation)
    how = how if len(how) <= _MOST_SIGNS else f"{how[: _MOST_SIGNS // 2]} … {how[-_MOST_SIGNS // 4 :]}"
    return f"{made} = {how} of {taken}" if taken else f"{made} = {how}"


def _shortened(names: list[str]) -> str:
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[:3])}, …, {names[-1]} ({len(names)} tensors)"


def _ranges(numbers: Iterable[str]) -> str:
    """0…79: numbers in the order of layers, as runs."""
    ordered = sorted({int(n) for n in numbers})
    starts = [n for n in ordered if n - 1 not in set(ordered)]
    stops = [n for n in ordered if n + 1 not in set(ordered)]
    return ", ".join(str(a) if a == b else f"{a}…{b}" for a, b in zip(starts, stops, strict=True))
