"""What a transformation says while it runs: places rewritten, places refused, weight maps. Kept per thread and call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from refold import fx_private
from refold.errors import BrokenTransformation
from refold.record.outcome import Refused, Rewritten
from refold.record.released import ReleasedMemory
from refold.weights.maps import MapRecord


@dataclass
class Recording:
    """The notes of one running call."""

    label: str = ""
    module: GraphModule | None = None
    """The module whose change the call will record; None where it has none of its own to record."""
    outer: Recording | None = None
    """The call that this one was made in."""
    maps: list[MapRecord] = field(default_factory=list)
    rewritten: list[Rewritten] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    released: ReleasedMemory = field(default_factory=ReleasedMemory)
    """Where weights that can be computed again give their memory up."""
    computed_from: dict[str, str] = field(default_factory=dict)
    """By name: fingerprints of the weights that constants were computed from."""
    signatures: dict[int, int] = field(default_factory=dict)
    """Signatures by the id of the transformation: settings do not change while a call runs."""
    inside: list[Rewritten] = field(default_factory=list)
    """What calls made inside this one have rewritten."""
    made: dict[str, _Made] = field(default_factory=dict)
    """By name: the tensors that calls made inside this one have made by weight maps."""

    def skip(self, node: Node | str, reason: str) -> None:
        """Say why a place was left alone."""
        self.refused.append(Refused(node if isinstance(node, str) else node.name, reason))

    def rewrote(self, nodes: tuple[Node | str, ...], what: str) -> None:
        """Say what was rewritten."""
        self.rewritten.append(Rewritten(tuple(n if isinstance(n, str) else n.name for n in nodes), what))

    def absorb(self, inner: Recording, find: Callable[[str], torch.Tensor | None]) -> None:
        """Make the weight maps of a call inside this one its own: the whole is one change."""
        self.maps += inner.maps
        self.computed_from |= inner.computed_from
        self.inside += inner.rewritten
        self.refused += inner.refused
        for name, record in _makers(inner.maps).items():
            tensor = find(name)
            if tensor is not None:
                self.made[name] = _Made(record, tensor, _state(tensor))

    def check_sources(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise if a weight map read something else than the tensor that stood under a name before the call, or one
        that an earlier map had made: undoing would give back other weights, or lose what was trained since. A tensor
        that is new altogether is no concern, unless it may have been made for a call inside this one."""
        made: set[str] = set()
        for record in self.maps:
            for role, name in record.map.sources.items():
                source = record.specs[role].original.get()  # None: gone already, so none of those before the call
                is_new = name not in tensors and not any(source is tensor for tensor in tensors.values())
                stood_there = name in tensors and source is tensors[name]
                if name not in made and not stood_there and (self.inside or not is_new):
                    raise BrokenTransformation(
                        f"{self.label} put {name} in its place and then computed weights from it, so that no record "
                        f"can tell how they come back. Put the two one after the other instead: refold.compose(...)."
                    )
            made |= set(record.map.targets.values())

    def check_made(self, find: Callable[[str], torch.Tensor | None]) -> None:
        """Raise if a tensor that a weight map accounts for is no longer the one that the map made: undoing would give
        other weights back."""
        makers = _makers(self.maps)
        written = self.written()
        for name, made in self.made.items():
            if makers.get(name) is made.record and (find(name) is not made.tensor or name in written):
                raise BrokenTransformation(
                    f"{self.label} changed {name}, which a transformation that it called had made, so that no record "
                    f"can tell how the weights come back. Put the two one after the other instead: refold.compose(...)."
                )

    def written(self) -> list[str]:
        """The tensors made by calls inside this one that were written into since; what they were made of may share
        their memory."""
        return [name for name, made in self.made.items() if _state(made.tensor) != made.state]


@dataclass(frozen=True)
class _Made:
    """A tensor as a weight map made it."""

    record: MapRecord
    tensor: torch.Tensor
    state: tuple[Any, Any]


def _state(tensor: torch.Tensor) -> tuple[Any, Any]:
    return fx_private.versions_of([tensor])[0], fx_private.address_of(tensor)


def _makers(maps: Iterable[MapRecord]) -> dict[str, MapRecord]:
    """By name: the map that made a tensor which no later map has read."""
    found: dict[str, MapRecord] = {}
    for record in maps:
        for name in record.map.sources.values():
            found.pop(name, None)
        found |= dict.fromkeys(record.map.targets.values(), record)
    return found


_current: ContextVar[Recording | None] = ContextVar("refold_recording", default=None)
_groups: ContextVar[tuple[tuple[int, int], ...]] = ContextVar("refold_groups", default=())


@contextmanager
def recording(label: str = "", module: GraphModule | None = None) -> Iterator[Recording]:
    """A fresh recording for one call; calls nest."""
    notes = Recording(label, module, _current.get())
    token = _current.set(notes)
    try:
        yield notes
    finally:
        _current.reset(token)


def current() -> Recording:
    """The recording of the call that runs in this thread; one that is thrown away when none runs."""
    return _current.get() or Recording()


def recorder_of(module: GraphModule) -> Recording | None:
    """The innermost running call that will record the change of a module."""
    return next((notes for notes in _running() if notes.module is module), None)


def check_not_inside(module: GraphModule, label: str) -> None:
    """Raise if a module lies inside one that is being transformed: a record holds one graph."""
    for notes in _running():
        if notes.module is not None and notes.module is not module and module in notes.module.modules():
            raise BrokenTransformation(
                f"{notes.label} calls {label} on a module inside the one that it is transforming, whose record does "
                f"not hold the graphs inside. Call {label} on that module before it, or after."
            )


def _running() -> Iterator[Recording]:
    """The calls that run in this thread, innermost first."""
    notes = _current.get()
    while notes is not None:
        yield notes
        notes = notes.outer


@contextmanager
def grouped(signature: int, number: int) -> Iterator[None]:
    """Changes recorded inside belong together: they are one call of a composition."""
    token = _groups.set((*_groups.get(), (signature, number)))
    try:
        yield
    finally:
        _groups.reset(token)


def groups() -> tuple[tuple[int, int], ...]:
    """The compositions that run in this thread, outermost first."""
    return _groups.get()
