"""Checkpoints both ways: a folded model loads the original's checkpoints, and saves as one.

A checkpoint moves through the weight maps of the history like a database through its migrations: forward in order, back
in reverse order. Names that no map mentions are loaded as usual.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule
from torch.nn.modules.module import _IncompatibleKeys

from refold.capturing.module import RECORD
from refold.change import Change, join_path
from refold.errors import RefoldError, WeightsChanged
from refold.fingerprint import fingerprint
from refold.history import History, attach, check_graph_module, history
from refold.hollow import hollow_original, named_tensors, tensor_places
from refold.keeping import Husk
from refold.outlines import outline_of
from refold.passing import tensors_in
from refold.redoing import redone_from
from refold.weights import MapRecord, NoInverse, Tensors, remember


class CheckpointMismatch(RefoldError, RuntimeError):
    """A checkpoint lacks entries, or has too many, or wrongly shaped ones; nothing was loaded."""


def original_state_dict(gm: GraphModule) -> dict[str, Any]:
    """The state dict of the original, from the folded module: its names, order and values. Weights that were changed
    while folded are carried back as `undo` does; what no rewrite touched is shared with the module, as in torch.
    Parameters that a captured graph never reads (`refold.unread_parameters`) come last."""
    found = _own_state_dict(gm)
    for name, tensor in _unread(gm).items():
        found.setdefault(name, tensor.detach())
    return found


def _own_state_dict(gm: GraphModule) -> dict[str, Any]:
    if not history(check_graph_module(gm)):
        return gm.state_dict()
    values = to_original(gm, named_tensors(gm))
    layout = _layout(gm)
    found: OrderedDict[str, Any] = OrderedDict()
    for key, entry in layout.entries.items():
        found[key] = values[key].detach() if key in layout.named else entry
    for key in [k for k in found if k not in layout.named]:
        found[key] = gm.get_submodule(key.rpartition(".")[0]).get_extra_state()
    found._metadata = layout.metadata  # type: ignore[attr-defined]
    return found


@torch.no_grad()
def to_original(gm: GraphModule, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Tensors with the names and shapes of the folded module's (its own, or an average of them), as the original's."""
    state = dict(tensors)
    for change in reversed(history(gm).changes):
        _check_unmapped(change, state)
        for record in reversed(change.maps):
            if not record.map.sources and not state.keys() & set(record.map.targets.values()):
                continue  # a constant, which a checkpoint of the folded module does not hold either
            current = {role: _take(state, name) for role, name in record.map.targets.items()}
            state |= {record.map.sources[role]: value for role, value in _recover(record, current, change).items()}
        for name in change.prints:
            state.pop(name, None)
        state = dict(_held(change)) | {n: state[now] for n, now in change.renamed.items() if now in state} | state
    return state


@torch.no_grad()
def to_folded(gm: GraphModule, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Tensors with the names and shapes of the original's, as the folded module's."""
    state = dict(tensors)
    for change in history(gm).changes:
        for record in change.maps:
            old = {role: _take(state, name) for role, name in record.map.sources.items()}
            new = record.map.operation.forward(old)
            state |= {record.map.targets[role]: value for role, value in new.items()}
        _rename(state, change)
    return state


def load_original_state_dict(gm: GraphModule, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
    """Load a checkpoint of the original into the folded module; returns what `load_state_dict` returns.

    Everything is checked and computed before the first weight is written, so an error leaves the module as it was; an
    interrupt that comes while weights are written is raised when all of them are. The undo records are renewed: undo
    gives the loaded checkpoint back bit for bit. Beside the checkpoint, memory holds the folded layers once more. Where
    a rewrite made tensors without a weight map, all rewrites are done again on a copy that has the checkpoint.
    """
    unread = _unread(check_graph_module(gm))
    asides = {name: state_dict[name] for name in unread if name in state_dict}
    if not asides:
        return _load_own(gm, state_dict, strict)
    _check_asides(unread, asides, strict)
    outcome = _load_own(gm, _without(state_dict, asides), strict)
    _carry_out(_Plan({}, [(unread[name], value) for name, value in asides.items()]), lambda: None)
    return outcome


def _load_own(gm: GraphModule, state_dict: Mapping[str, Any], strict: bool) -> Any:
    past = history(gm)
    if any(change.prints for change in past.changes):
        return _load_by_redoing(gm, past, state_dict, strict)
    outline = outline_of(gm, past)
    if outline is not None and outline.fits(state_dict):
        plan = _plan(gm, past, outline.named, dict(state_dict))
        _carry_out(plan, lambda: _renew(gm, past, plan))
        return _IncompatibleKeys([], [])
    layout = _layout(gm)
    with layout.lock:
        outcome, given = layout.accept(state_dict, strict)
    plan = _plan(gm, past, layout.named, given)
    _carry_out(plan, lambda: _renew(gm, past, plan))
    _load_extra_state(gm, layout, state_dict)
    return outcome


def _unread(gm: GraphModule) -> Tensors:
    """Parameters of the captured model that its graph never reads: checkpoints of the model hold them."""
    record = gm.meta.get(RECORD)
    own = named_tensors(gm) if record is not None and record.unread else {}
    return {name: t for name, t in record.unread.items() if name not in own} if record is not None else {}


def _check_asides(unread: Tensors, asides: Mapping[str, Any], strict: bool) -> None:
    """Say what torch would say about them, if the module had them."""
    told = [f'Missing key(s) in state_dict: "{name}".' for name in unread if strict and name not in asides]
    for name, value in asides.items():
        if not isinstance(value, torch.Tensor) or value.shape != unread[name].shape:
            shapes = (
                f"{getattr(value, 'shape', None)} from checkpoint, the shape in current model is {unread[name].shape}"
            )
            told.append(f"size mismatch for {name}: copying a param with shape {shapes}.")
    if told:
        lines = "\n\t".join(["Error(s) in loading state_dict for what the captured graph never reads:", *told])
        raise CheckpointMismatch(f"{lines}\nNothing was loaded.")


def _without(state_dict: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    rest: OrderedDict[str, Any] = OrderedDict((k, v) for k, v in state_dict.items() if k not in set(names))
    rest._metadata = getattr(state_dict, "_metadata", None)  # type: ignore[attr-defined]
    return rest


def _load_by_redoing(gm: GraphModule, past: History, state_dict: Mapping[str, Any], strict: bool) -> Any:
    layout = _layout(gm)
    with layout.lock:
        layout.accept(state_dict, strict)
    try:
        twin, outcome = redone_from(gm, state_dict, strict)
    except (RefoldError, RuntimeError) as reason:
        change = next(change for change in past.changes if change.prints)
        raise CheckpointMismatch(
            f"{change.label} made {', '.join(change.prints)} without saying how they come from the original's weights, "
            f"and doing all rewrites again with this checkpoint failed: {reason} Nothing was loaded. Undo it, load the "
            f"checkpoint, and apply it again."
        ) from reason
    made = named_tensors(twin)
    plan = _Plan({}, [(tensor, made[name]) for name, tensor in named_tensors(gm).items()])
    _carry_out(plan, lambda: attach(gm, history(twin)))
    _load_extra_state(gm, layout, state_dict)
    return outcome


def _renew(gm: GraphModule, past: History, plan: _Plan) -> None:
    """Give the module a history with renewed records; what the original looks like stays."""
    maps = [record for change in past.changes for record in change.maps]
    if all(a is b for a, b in zip(maps, [record for c in plan.changes for record in c.maps], strict=True)):
        return
    fresh = History(tuple(plan.changes), past.birth, past.expected)
    if past in _layouts:
        _layouts[fresh] = _layouts[past]
    attach(gm, fresh)


# --- what the original looks like ----------------------------------------------------------------------------------


class _Layout:
    """The original's structure on the meta device; torch's own loading runs on it, hooks and reports included."""

    def __init__(self, gm: GraphModule) -> None:
        self.lock = threading.Lock()
        self.module = hollow_original(gm)
        self.places = [(name, table, key, table[key]) for name, table, key in tensor_places(self.module)]
        self.named = {name: tensor for name, _, _, tensor in self.places}
        state = self.module.state_dict(keep_vars=True)
        self.entries = dict(state)
        self.metadata = getattr(state, "_metadata", None)

    def accept(self, state_dict: Mapping[str, Any], strict: bool) -> tuple[Any, Tensors]:
        """Torch's outcome, and the given tensors by their names in the original."""
        given: OrderedDict[str, Any] = OrderedDict(state_dict)
        # torch notes `assign` in the checkpoint's own metadata, where a later load of it would find it
        given._metadata = copy.deepcopy(getattr(state_dict, "_metadata", None))  # type: ignore[attr-defined]
        try:
            load = self.module.load_state_dict
            outcome = _as_refold_error(lambda: load(given, strict=strict, assign=True))
            return outcome, {name: table[key] for name, table, key, was in self.places if table[key] is not was}
        finally:
            for _, table, key, was in self.places:
                table[key] = was


_layouts: weakref.WeakKeyDictionary[History, tuple[Any, _Layout]] = weakref.WeakKeyDictionary()


def _layout(gm: GraphModule) -> _Layout:
    """The layout of the original; made once for a history (which never changes) and the dtypes its module has now."""
    past = history(gm)
    kind = tuple((tensor.dtype, tensor.shape) for tensor in named_tensors(gm).values())
    known = _layouts.get(past)
    if known is None or known[0] != kind:
        known = _layouts[past] = (kind, _Layout(gm))
    return known[1]


def _as_refold_error(load: Callable[[], Any]) -> Any:
    try:
        return load()
    except RuntimeError as error:
        raise CheckpointMismatch(f"{error}\nNothing was loaded.") from None


# --- planning ------------------------------------------------------------------------------------------------------


@dataclass
class _Plan:
    """What to write where, and the changes with renewed records."""

    state: Tensors
    writes: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)


@torch.no_grad()
def _plan(gm: GraphModule, past: History, named: Mapping[str, Any], given: Tensors) -> _Plan:
    current = named_tensors(gm)
    plan = _Plan(_completed(gm, past, named, given))
    consumed = _consumed_later(past)
    for index, change in enumerate(past.changes):
        maps = []
        for place, record in enumerate(change.maps):
            last = (index, place) not in consumed
            maps.append(_pass_through(plan, record, current, last))
        _rename(plan.state, change)
        plan.changes.append(replace(change, maps=tuple(maps)))
    held = {name: tensor for change in past.changes for name, tensor in _held(change)}
    for name, value in plan.state.items():
        target = current.get(name, held.get(name))
        if target is None:
            raise CheckpointMismatch(f"{name} of the checkpoint has no place in the folded module. Nothing was loaded.")
        plan.writes.append((target, value))
    return plan


def _completed(gm: GraphModule, past: History, named: Mapping[str, Any], given: Tensors) -> Tensors:
    """The given tensors in the original's dtypes; where only some sources of a map are given (or some are never in a
    checkpoint), the others as they are now."""
    sources = {name for change in past.changes for record in change.maps for name in record.map.sources.values()}
    missing = [name for name in named if name in sources and name not in given]
    state = {n: t.detach().to(named[n].dtype) if n in sources else t.detach() for n, t in given.items()}
    groups = [set(record.map.sources.values()) for change in past.changes for record in change.maps]
    needed = {name for name in missing for group in groups if name in group and group & given.keys()}
    if needed:
        now = to_original(gm, named_tensors(gm))
        state |= {name: now[name].clone() for name in needed}
    return state


def _consumed_later(past: History) -> set[tuple[int, int]]:
    """The places of maps whose targets a later map reads, or which have another name later."""
    consumed: set[tuple[int, int]] = set()
    maker: dict[str, tuple[int, int]] = {}
    for i, change in enumerate(past.changes):
        for j, record in enumerate(change.maps):
            consumed |= {maker[name] for name in record.map.sources.values() if name in maker}
            maker |= dict.fromkeys(record.map.targets.values(), (i, j))
        consumed |= {maker[name] for name in change.renamed if name in maker}
    return consumed


def _pass_through(plan: _Plan, record: MapRecord, current: Tensors, last: bool) -> MapRecord:
    """Move one map's sources to its targets; the record that fits the new values."""
    names = record.map.sources
    if names and not any(name in plan.state for name in names.values()):
        return record  # nothing of it was given: it stays as it is
    old = {role: _take(plan.state, name) for role, name in names.items()}
    targets = {role: current[name] for role, name in record.map.targets.items()} if last else {}
    views = _views(record, targets) if targets else None
    if views is not None:
        plan.writes += [(views[role], value) for role, value in old.items()]
        return record
    device = next((t.device for t in targets.values()), next((t.device for t in old.values()), None))
    old = {role: value.to(device) for role, value in old.items()}
    new = {role: value.contiguous() for role, value in record.map.operation.forward(old).items()}
    if not new:
        return record  # a constant: no checkpoint says anything about it
    if last:
        new = {role: value.to(targets[role].dtype) for role, value in new.items()}
        plan.writes += [(targets[role], value) for role, value in new.items()]
    else:
        plan.state |= {record.map.targets[role]: value for role, value in new.items()}
    return record if record.map.operation.structural else _renewed(record, old, new)


def _views(record: MapRecord, targets: Tensors) -> Tensors | None:
    """The places of a structural map's sources inside its targets' memory, if they fill it."""
    if not record.map.operation.structural or not record.map.sources:
        return None
    views = record.map.operation.inverse(targets, {})
    size = sum(t.numel() for t in targets.values())
    inside = {t.untyped_storage().data_ptr() for t in targets.values()}
    fill = sum(view.numel() for view in views.values()) == size
    return views if fill and all(v.untyped_storage().data_ptr() in inside for v in views.values()) else None


def _renewed(record: MapRecord, old: Tensors, new: Tensors) -> MapRecord:
    specs = {role: replace(spec, dtype=old[role].dtype) for role, spec in record.specs.items()}
    fresh = MapRecord(record.map, specs, {role: tensor.dtype for role, tensor in new.items()})
    kept_whole = bool(record.originals)
    remember(fresh, old, new, "original" if kept_whole else "correction")
    fresh.originals = {role: tensor.clone() for role, tensor in fresh.originals.items()}
    return fresh


# --- parts ---------------------------------------------------------------------------------------------------------


def _carry_out(plan: _Plan, finish: Callable[[], Any]) -> None:
    """Write everything, whatever interrupts: writing can be repeated, so an interrupt starts it again."""
    interrupt: KeyboardInterrupt | None = None
    done = False
    while not done:
        try:
            with torch.no_grad():
                for target, value in plan.writes:
                    target.copy_(value)
            finish()
            done = True
        except KeyboardInterrupt as stop:
            interrupt = stop
    if interrupt is not None:
        raise interrupt


def _take(state: Tensors, name: str) -> torch.Tensor:
    if name not in state:
        raise CheckpointMismatch(f"{name} is missing, and a rewrite needs it. Give a tensor for every weight.")
    return state.pop(name)


def _rename(state: Tensors, change: Change) -> None:
    """Give tensors that a change passed on the names they have after it; tied ones are one then."""
    for before, after in change.renamed.items():
        if before in state:
            value = state.pop(before)
            state.setdefault(after, value)


def _recover(record: MapRecord, current: Tensors, change: Change) -> Tensors:
    try:
        return record.recover(current)
    except NoInverse as reason:
        names = ", ".join(record.map.targets.values())
        raise WeightsChanged(f"{names} cannot be carried back through {change.label}: {reason}.") from None


def _check_unmapped(change: Change, state: Mapping[str, torch.Tensor]) -> None:
    for name, mark in change.prints.items():
        if name in state and not state[name].is_meta and fingerprint(state[name]) != mark:
            raise WeightsChanged(
                f"{name}, which {change.label} made, was changed since, and the transformation does not say how to "
                f"carry that back, so the original checkpoint is not known. Undo with weights='original' first."
            )


def _held(change: Change) -> Iterable[tuple[str, torch.Tensor]]:
    """Tensors that a change removed without a map and keeps, by the names they had."""
    for (path, _table), entry in change.tables.items():
        for key, value in entry.before.items():
            yield from _named_in(value, join_path(path, key))


def _named_in(value: Any, path: str) -> Iterable[tuple[str, torch.Tensor]]:
    if not isinstance(value, Husk):
        yield from tensors_in(value, path)
        return
    for table in value.tables.values():
        for key, entry in table.items():
            yield from _named_in(entry, join_path(path, key))


def _load_extra_state(gm: GraphModule, layout: _Layout, state_dict: Mapping[str, Any]) -> None:
    for key in layout.entries:
        if key not in layout.named and key in state_dict:
            gm.get_submodule(key.rpartition(".")[0]).set_extra_state(state_dict[key])
