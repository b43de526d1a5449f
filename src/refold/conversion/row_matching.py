"""A table of a layout on the tensors of a checkpoint: a plan, and the names that stay as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from refold.conversion.checkpoint_folder import Kind
from refold.conversion.layout_tables import Layout, Row, number_of
from refold.conversion.shape_trial import DoesNotFit, tried
from refold.conversion.tensor_plan import Plan
from refold.errors import BadLayout
from refold.weights import Concatenate, Operation, Rename, Reshape, Slice
from refold.weights.maps import WeightMap
from refold.wording import one_line


@dataclass(frozen=True)
class Matching:
    """What a table makes of a checkpoint."""

    plan: Plan
    passed: tuple[str, ...]
    """Tensors that no row explains."""
    incomplete: dict[str, str]
    """Of these, the ones that a row would take if others were there, or that their layer leaves behind; and why."""


@dataclass
class _Instance:
    """A row on certain words: the names that it takes, by the number that is stacked and their place in the row."""

    row: Row
    words: dict[str, str]
    names: dict[tuple[int, int], str] = field(default_factory=dict)

    @property
    def modules(self) -> set[str]:
        """The modules whose tensors it takes."""
        return {name.rpartition(".")[0] for name in self.names.values()}

    def missing(self) -> str:
        """A name that it needs and does not have, or nothing."""
        row = self.row
        for number in range(max(number for number, _ in self.names) + 1):
            for place, pattern in enumerate(row.taken):
                if (number, place) not in self.names:
                    return row.named(pattern, {**self.words, row.stack: str(number)})
        return ""


def match_layout(layout: Layout, kinds: Mapping[str, Kind], config: Mapping[str, Any]) -> Matching:
    """The plan by which these tensors come into a layout. A name that two rows claim is an error."""
    instances = [instance for row in layout.rows for instance in _instances(row, kinds)]
    _check_claims(instances)
    lacking = {id(i): i.missing() for i in instances}
    whole = [i for i in instances if not lacking[id(i)]]
    broken = [i for i in instances if lacking[id(i)]]
    _check_halves(whole, broken, lacking)
    maps = [m for instance in whole for m in _Maps(kinds, config, instance).made()]
    plan = Plan(tuple(maps))
    taken = {name for instance in whole for name in instance.names.values()}
    passed = tuple(name for name in kinds if name not in taken)
    _check_targets(plan, passed)
    reasons = _left_behind(plan, passed)
    reasons |= {name: f"{lacking[id(i)]} is not there" for i in broken for name in i.names.values()}
    return Matching(plan, passed, reasons)


def _left_behind(plan: Plan, passed: Iterable[str]) -> dict[str, str]:
    """Names that stay where no other tensor of their layer does, such as the scales of a quantized weight."""
    groups = plan.groups()
    kept = {name.rpartition(".")[0] for group in groups for name in group.targets}
    gone = {name.rpartition(".")[0]: name for group in groups for name in group.sources}
    layers = {name: name.rpartition(".")[0] for name in passed}
    return {
        name: f"no row explains it, and {gone[layer]} of the same layer goes elsewhere"
        for name, layer in layers.items()
        if layer in gone and layer not in kept
    }


def _instances(row: Row, names: Iterable[str]) -> list[_Instance]:
    found: dict[tuple[tuple[str, str], ...], _Instance] = {}
    for place, pattern in enumerate(row.taken):
        expression = row.expression(pattern)
        for name in names:
            match = expression.fullmatch(name)
            if match is None:
                continue
            words = match.groupdict()
            number = int(words.pop(row.stack)) if row.stack and row.joins else 0
            instance = found.setdefault(tuple(sorted(words.items())), _Instance(row, words))
            instance.names[number, place] = name
    return list(found.values())


def _check_claims(instances: Iterable[_Instance]) -> None:
    claimed: dict[str, Row] = {}
    for instance in instances:
        for name in instance.names.values():
            if name in claimed:
                raise BadLayout(
                    f"two rows claim {name}: ({claimed[name]}) and ({instance.row}). Make their names more definite. "
                    f"Nothing was written."
                )
            claimed[name] = instance.row


def _check_halves(whole: list[_Instance], broken: list[_Instance], lacking: Mapping[int, str]) -> None:
    """Refuse where a row takes the weights of layers, but cannot take their biases: the result would be no layer."""
    modules = {module for instance in whole for module in instance.modules}
    for instance in broken:
        if instance.modules & modules:
            name = next(iter(instance.names.values()))
            raise BadLayout(
                f"{name} cannot go where the other tensors of its layer go: {lacking[id(instance)]} is not there. "
                f"Nothing was written."
            )


def _check_targets(plan: Plan, passed: Iterable[str]) -> None:
    taken = set(passed)
    for group in plan.groups():
        for name in group.targets:
            if name in taken:
                raise BadLayout(f"two tensors would have the name {name}. Nothing was written.")
            taken.add(name)


class _Maps:
    """The maps of one instance, in order. Each is tried on tensors without numbers, so that what does not fit is known
    before anything is read."""

    def __init__(self, kinds: Mapping[str, Kind], config: Mapping[str, Any], instance: _Instance) -> None:
        self._row, self._words, self._config = instance.row, instance.words, config
        self._names = [name for _, name in sorted(instance.names.items())]
        self._count = len({number for number, _ in instance.names})
        self._check_dtypes(kinds)
        self._state = {name: torch.empty(kinds[name].shape, dtype=torch.uint8, device="meta") for name in self._names}
        self._maps: list[WeightMap] = []

    def _check_dtypes(self, kinds: Mapping[str, Kind]) -> None:
        first = self._names[0]
        for name in self._names:
            if kinds[name].dtype != kinds[first].dtype:
                raise BadLayout(
                    f"{first} is {kinds[first].dtype} and {name} is {kinds[name].dtype}: only tensors of one dtype can "
                    f"become one. Nothing was written."
                )

    def made(self) -> list[WeightMap]:
        if self._row.joins:
            self._join()
        else:
            self._split()
        return self._maps

    def _join(self) -> None:
        row, names = self._row, self._names
        whole = row.named(row.whole, self._words)
        shapes = [self._state[name].shape for name in names]
        if len(names) > 1:
            if len({len(shape) for shape in shapes}) > 1 or len(shapes[0]) <= row.along:
                raise BadLayout(f"{names[0]} and {names[1]} have no axis {row.along} along which they could be joined.")
            sizes = tuple(shape[row.along] for shape in shapes)
            self._add(Concatenate(sizes, row.along), {str(i): n for i, n in enumerate(names)}, {"whole": whole})
        elif not row.steps and not row.stack:
            self._add(Rename(), {"weight": names[0]}, {"weight": whole})
        now = whole if len(names) > 1 else names[0]
        if row.stack:
            now = self._stack(now, whole)
        self._steps(now, whole)

    def _stack(self, now: str, whole: str) -> str:
        shape = tuple(self._state[now].shape)
        if not shape or shape[0] % self._count:
            raise BadLayout(f"the tensors that become {whole} have different shapes, or none.")
        self._change(Reshape(shape, (self._count, shape[0] // self._count, *shape[1:])), now, whole)
        return whole

    def _split(self) -> None:
        row, whole = self._row, self._names[0]
        self._steps(whole, whole)
        shape, count = tuple(self._state[whole].shape), 1
        if row.stack:
            if len(shape) < 2:
                raise BadLayout(f"{whole} has no axis of experts: its shape is {list(shape)}.")
            count = shape[0]
            self._change(Reshape(shape, (shape[0] * shape[1], *shape[2:])), whole, whole)
            shape = tuple(self._state[whole].shape)
        words = [{**self._words, row.stack: str(number)} for number in range(count)]
        names = [row.named(pattern, each) for each in words for pattern in row.parts]
        if len(names) == 1:
            self._change(Rename(), whole, names[0])
            return
        sizes = self._shares(whole, shape, count) * count
        self._add(Slice(sizes, row.along), {"whole": whole}, {str(i): n for i, n in enumerate(names)})

    def _shares(self, whole: str, shape: tuple[int, ...], count: int) -> tuple[int, ...]:
        row = self._row
        shares = [number_of(share, self._config) for share in row.shares or (1,) * len(row.parts)]
        if len(shape) <= row.along or min(shares) < 0 or not sum(shares):
            raise BadLayout(f"{whole} of shape {list(shape)} has no axis {row.along} that could be split.")
        if shape[row.along] % (sum(shares) * count):
            raise BadLayout(f"{whole} of shape {list(shape)} cannot be split in the shares {shares}.")
        unit = shape[row.along] // (sum(shares) * count)
        return tuple(unit * share for share in shares)

    def _steps(self, now: str, whole: str) -> None:
        for step in self._row.steps:
            try:
                operation = step.operation(tuple(self._state[now].shape), self._config)
            except BadLayout as error:
                raise BadLayout(f"{now}: {error} Nothing was written.") from None
            self._change(operation, now, whole)
            now = whole

    def _change(self, operation: Operation, now: str, after: str) -> None:
        self._add(operation, {"weight": now}, {"weight": after})

    def _add(self, operation: Operation, sources: dict[str, str], targets: dict[str, str]) -> None:
        given = {role: self._state.pop(name) for role, name in sources.items()}
        try:
            made = tried(operation, given)
        except DoesNotFit as error:
            shapes = ", ".join(f"{name} {list(given[role].shape)}" for role, name in sources.items())
            raise BadLayout(
                f"{operation} does not fit {shapes}: {one_line(error, 200)}. Nothing was written."
            ) from None
        self._state |= {targets[role]: tensor for role, tensor in made.items()}
        self._maps.append(WeightMap(operation, sources, targets))
