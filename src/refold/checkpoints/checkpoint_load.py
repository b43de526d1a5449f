"""A checkpoint of the original is loaded into the folded module: planned, checked, then written."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from refold.checkpoints.original_state import OriginalModules, rename_retained, take, to_original, unread_tensors
from refold.checkpoints.repetition import repeat_with
from refold.errors import CheckpointMismatch, RefoldError
from refold.fingerprint import is_sharded
from refold.fx_private import named_tensors
from refold.record.change import Change
from refold.record.sharded_modules import show_shards
from refold.record.stack import History, attach, check_graph_module, history
from refold.weights import Tensors
from refold.weights.maps import MapRecord, remember
from refold.weights.sharded import lay_out, layout_of, local_parts, plan_forward


def load_original_state_dict(gm: GraphModule, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
    """Load a checkpoint of the original into the folded module; returns what `load_state_dict` returns.

    Everything is checked and computed before the first weight is written, so an error leaves the module as it was; an
    interrupt that comes while weights are written is raised when all of them are. The undo records are renewed: undo
    gives the loaded checkpoint back bit for bit. Beside the checkpoint, memory holds the folded layers once more. Where
    a rewrite made tensors without a weight map, all rewrites are done again on a copy that has the checkpoint.
    """
    show_shards(check_graph_module(gm))
    unread = unread_tensors(gm)
    given = {name: state_dict[name] for name in unread if name in state_dict}
    if not given:
        return _load_own(gm, state_dict, strict)
    _check_unread(unread, given, strict)
    outcome = _load_own(gm, _without(state_dict, given), strict)
    _carry_out(_Plan({}, [(unread[name], value) for name, value in given.items()]), lambda: None)
    return outcome


def _load_own(gm: GraphModule, state_dict: Mapping[str, Any], strict: bool) -> Any:
    past = history(gm)
    if any(change.fingerprints for change in past.changes):
        return _load_by_repetition(gm, past, state_dict, strict)
    original = OriginalModules(gm)
    outcome, given = original.load(state_dict, strict)
    plan = _plan(gm, past, original.tensors, given)
    _carry_out(plan, lambda: attach(gm, History(tuple(plan.changes), past.initial_order, past.expected)))
    _load_extra_state(gm, original, state_dict)
    return outcome


def _check_unread(unread: Tensors, given: Mapping[str, Any], strict: bool) -> None:
    """Say what torch would say about them, if the module had them."""
    problems = [f'Missing key(s) in state_dict: "{name}".' for name in unread if strict and name not in given]
    for name, value in given.items():
        if not isinstance(value, torch.Tensor) or value.shape != unread[name].shape:
            shapes = (
                f"{getattr(value, 'shape', None)} from checkpoint, the shape in current model is {unread[name].shape}"
            )
            problems.append(f"size mismatch for {name}: copying a param with shape {shapes}.")
    if problems:
        lines = "\n\t".join(["Error(s) in loading state_dict for what the captured graph never reads:", *problems])
        raise CheckpointMismatch(f"{lines}\nNothing was loaded.")


def _without(state_dict: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    rest: OrderedDict[str, Any] = OrderedDict((k, v) for k, v in state_dict.items() if k not in set(names))
    rest._metadata = getattr(state_dict, "_metadata", None)  # type: ignore[attr-defined]
    return rest


def _load_by_repetition(gm: GraphModule, past: History, state_dict: Mapping[str, Any], strict: bool) -> Any:
    original = OriginalModules(gm)
    original.load(state_dict, strict)
    try:
        again, outcome = repeat_with(gm, state_dict, strict)
    except (RefoldError, RuntimeError) as reason:
        change = next(change for change in past.changes if change.fingerprints)
        raise CheckpointMismatch(
            f"{change.label} made {', '.join(change.fingerprints)} without saying how they come from the original's "
            f"weights, and doing all rewrites again with this checkpoint failed: {reason} Nothing was loaded. Undo it, "
            f"load the checkpoint, and apply it again."
        ) from reason
    made = named_tensors(again)
    plan = _Plan({}, [(tensor, made[name]) for name, tensor in named_tensors(gm).items()])
    _carry_out(plan, lambda: attach(gm, history(again)))
    _load_extra_state(gm, original, state_dict)
    return outcome


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
        maps = [_pass_through(plan, r, current, (index, place) not in consumed) for place, r in enumerate(change.maps)]
        rename_retained(plan.state, change)
        plan.changes.append(replace(change, maps=tuple(maps)))
    held = {name: tensor for change in past.changes for name, tensor in change.held_tensors()}
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
    old = {role: take(plan.state, name) for role, name in names.items()}
    targets = {role: current[name] for role, name in record.map.targets.items()} if last else {}
    views = _views(record, targets) if targets else None
    if views is not None:
        plan.writes += [(views[role], value) for role, value in old.items()]
        return record
    device = next((t.device for t in targets.values()), next((t.device for t in old.values()), None))
    old = {role: value.to(device) for role, value in old.items()}
    new = {role: value.contiguous() for role, value in record.forward(old).items()}
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
    if not record.map.operation.structural or not record.map.sources or any(map(is_sharded, targets.values())):
        return None
    views = record.map.operation.inverse(targets, {})
    size = sum(t.numel() for t in targets.values())
    inside = {t.untyped_storage().data_ptr() for t in targets.values()}
    fill = sum(view.numel() for view in views.values()) == size
    return views if fill and all(v.untyped_storage().data_ptr() in inside for v in views.values()) else None


def _renewed(record: MapRecord, old: Tensors, new: Tensors) -> MapRecord:
    specs = {role: replace(spec, dtype=old[role].dtype) for role, spec in record.specs.items()}
    sharding = record.sharding or plan_forward(record.map.operation, old)
    fresh = MapRecord(record.map, specs, {role: t.dtype for role, t in new.items()}, sharding=sharding)
    if sharding is not None:
        old, new = local_parts(sharding.sources, old), local_parts(sharding.targets, new)
    remember(fresh, old, new, "original" if record.originals else "correction")
    fresh.originals = {role: tensor.clone() for role, tensor in fresh.originals.items()}
    return fresh


# --- writing -------------------------------------------------------------------------------------------------------


def _carry_out(plan: _Plan, finish: Callable[[], Any]) -> None:
    """Write everything, whatever interrupts: writing can be repeated, so an interrupt starts it again."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            with torch.no_grad():
                for target, value in plan.writes:
                    target.copy_(lay_out(value, layout_of(target)))
            finish()
            break
        except KeyboardInterrupt as stop:
            interrupt = stop
    if interrupt is not None:
        raise interrupt


def _load_extra_state(gm: GraphModule, original: OriginalModules, state_dict: Mapping[str, Any]) -> None:
    for key in original.keys:
        if key not in original.tensors and key in state_dict:
            original.holder(gm, key).set_extra_state(state_dict[key])
