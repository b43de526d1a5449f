"""Optimizers follow their model: parameter groups and moments move through the weight maps, both ways.

with refold.carry_optimizer(optimizer, gm):
    refold.undo(gm)          # or any transformation, or several
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from refold.errors import OptimizerMismatch
from refold.fx_private import named_tensors
from refold.record.change import Change
from refold.record.sharded_modules import show_shards
from refold.record.snapshot import Snapshot
from refold.record.stack import check_graph_module, history
from refold.weights import Tensors
from refold.weights.maps import MapRecord


@dataclass
class Entry:
    """What an optimizer knows about one parameter."""

    group: int
    state: dict[str, Any]
    misfit: str = ""
    """The name of a state that does not have the parameter's shape, if there is one."""


Entries = dict[str, Entry]

# Entries of sources that no target can hold (a batch norm's γ while it is folded), by the target that replaced
# them: they come back when it is undone.
_parked: Any = WeakTensorKeyDictionary()

# How a state behaves when the gradient is multiplied by a number: 1 like the gradient, 2 like its square.
_POWERS = {
    "momentum_buffer": 1,
    "exp_avg": 1,
    "grad_avg": 1,
    "exp_inf": 1,
    "prev": 1,
    "sum": 2,
    "square_avg": 2,
    "acc_delta": -2,
}
_SCALE_FREE = {("RMSprop", "momentum_buffer")}
_NOT_GRADIENTS = {("ASGD", "ax")}
_ALL_AT_ONCE = {"LBFGS"}
"""Optimizers that treat all parameters as one long vector, in the order in which they were given."""
_MATRIX_WISE = {"Muon"}
"""Optimizers whose step of one number depends on the whole matrix around it: two in one train otherwise than apart."""


class Carrier:
    """Moves one optimizer from the parameters of a module before to those of a module after."""

    def __init__(self, optimizer: Optimizer, gm: GraphModule) -> None:
        self.optimizer, self.gm = optimizer, check_graph_module(gm)
        show_shards(gm)
        self.names, self.past = named_tensors(gm), history(gm).changes

    def to(self, after: GraphModule) -> None:
        """Where the parameters are afterwards, if not in the module itself (a transformation that works on a copy)."""
        self.gm = check_graph_module(after)

    def move(self) -> None:
        """Move groups and state. Everything is computed first; only then is the optimizer touched."""
        now, after = history(self.gm).changes, named_tensors(self.gm)
        common = _common(self.past, now)
        entries = _entries(self.optimizer, self.names)
        for change in reversed(self.past[common:]):
            for record in reversed(change.maps):
                _go_back(self.optimizer, record, entries, self.names, after)
        for change in now[common:]:
            for record in change.maps:
                _go_forward(self.optimizer, record, entries, after)
        _install(self.optimizer, entries, self.names, after)


@contextmanager
def carry_optimizer(optimizer: Optimizer, gm: GraphModule) -> Iterator[Carrier]:
    """Whatever is done to the module inside (transformations, undo), the optimizer goes on with its new parameters:
    same groups, same hyper-parameters, same moments and step counts. If that cannot be, OptimizerMismatch says why, and
    module and optimizer are as they were before the block. Gradients move by themselves."""
    carrier = Carrier(optimizer, gm)
    before = Snapshot.of(gm)
    try:
        yield carrier
        carrier.move()
    except BaseException:
        before.restore(gm)
        raise


def _common(before: tuple[Change, ...], after: tuple[Change, ...]) -> int:
    """How many of the first changes are the same."""
    count = 0
    for old, new in zip(before, after, strict=False):
        if old is not new and (old.signature, old.describe()) != (new.signature, new.describe()):
            break
        count += 1
    return count


# --- reading and writing an optimizer ------------------------------------------------------------------------------


def _entries(optimizer: Optimizer, names: dict[str, torch.Tensor]) -> Entries:
    by_id: dict[int, str] = {}
    for name, tensor in names.items():
        by_id.setdefault(id(tensor), name)
    found: Entries = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) in by_id:
                state = dict(optimizer.state.get(parameter, {}))
                misfits = [k for k, v in state.items() if _is_like_weight(k, v) and v.shape != parameter.shape]
                found[by_id[id(parameter)]] = Entry(index, state, "".join(misfits[:1]))
    return found


def _install(
    optimizer: Optimizer, entries: Entries, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]
) -> None:
    """Put the entries into the optimizer; every group stays in the order in which the module lists its parameters."""
    lost = [name for name in entries if name not in after]
    if lost:
        raise OptimizerMismatch(f"{', '.join(lost)} left the module without a weight map, so its state has no place.")
    known = {id(tensor) for tensor in before.values()}
    live = {id(after[name]) for name in entries}
    place = {id(tensor): i for i, tensor in reversed(list(enumerate(after.values())))}
    rows: list[list[torch.Tensor]] = []
    for index, group in enumerate(optimizer.param_groups):
        stay = [p for p in group["params"] if id(p) not in known or id(p) in live]
        fresh = [after[name] for name, entry in entries.items() if entry.group == index]
        fresh = [p for p in fresh if not any(p is q for q in stay)]
        rows.append(sorted([*stay, *fresh], key=lambda p: place.get(id(p), -1)) if fresh else stay)
    for group, row in zip(optimizer.param_groups, rows, strict=True):
        gone = [p for p in group["params"] if not any(p is q for q in row)]
        group["params"] = row
        for parameter in gone:
            optimizer.state.pop(parameter, None)
    for name, entry in entries.items():
        if entry.state:
            optimizer.state[after[name]] = entry.state


# --- moving through one map ----------------------------------------------------------------------------------------


def _go_forward(optimizer: Optimizer, record: MapRecord, entries: Entries, after: dict[str, torch.Tensor]) -> None:
    given = {role: entries.pop(name) for role, name in record.map.sources.items() if name in entries}
    if not given:
        return
    _check_elementwise(optimizer, record, given)
    successors = record.map.successors()
    kept = record.kept_tensors()
    values = {role: kept.get(role, spec.original.get()) for role, spec in record.specs.items()}
    inherits = {role: {r: given[r] for r in successors.get(role, ()) if r in given} for role in record.map.targets}
    needed = {role for role, ancestors in inherits.items() if ancestors}
    moved = _moved(optimizer, record, given, values, needed, forward=True) if needed else {}
    for role in needed:
        entry = _joint(optimizer, inherits[role], record)
        entries[record.map.targets[role]] = Entry(entry.group, entry.state | moved.get(role, {}))
    parked = {role: entry for role, entry in given.items() if role in record.kept}
    for name in record.map.targets.values():
        if name in after and parked:
            _parked[after[name]] = parked


def _go_back(
    optimizer: Optimizer,
    record: MapRecord,
    entries: Entries,
    before: dict[str, torch.Tensor],
    after: dict[str, torch.Tensor],
) -> None:
    targets, sources = record.map.targets, record.map.sources
    given = {role: entries.pop(name) for role, name in targets.items() if name in entries}
    parked: Entries = {}
    for name in targets.values():
        parked |= _parked.get(before[name], {}) if name in before else {}
    values = record.kept_tensors() | {role: after[name].detach() for role, name in sources.items() if name in after}
    successors = record.map.successors().items()
    successor_of = {source: target for target, group in successors for source in group if target in given}
    needed = set(successor_of) - set(parked)
    _check_elementwise(optimizer, record, given)
    moved = _moved(optimizer, record, given, values, needed, forward=False) if given else {}
    for role, name in sources.items():
        if role in successor_of and (role in moved or role not in parked):
            successor = given[successor_of[role]]
            group = parked[role].group if role in parked else successor.group
            entries[name] = Entry(group, _scalars(successor) | moved.get(role, {}))
        elif role in parked:
            entries[name] = parked[role]
        elif given and record.specs[role].is_parameter and record.specs[role].requires_grad:
            entries[name] = Entry(next(iter(given.values())).group, {})  # it was never in this optimizer: it starts


def _moved(
    optimizer: Optimizer, record: MapRecord, given: Entries, values: Tensors, needed: set[str], *, forward: bool
) -> dict[str, dict[str, torch.Tensor]]:
    """The state tensors shaped like the parameters, moved to the other side: by role, then by name of the state. Roles
    for which only some states are determined are left out, unless they are needed: then it cannot be done."""
    operation = record.map.operation
    keys = sorted({k for entry in given.values() for k, v in entry.state.items() if _is_like_weight(k, v)})
    by_key: dict[str, Tensors] = {}
    for key in keys:
        tensors = {role: entry.state[key] for role, entry in given.items() if key in entry.state}
        here = record.map.sources if forward else record.map.targets
        if operation.structural and set(tensors) != set(here):
            raise _refusal(record, f"the optimizer has the state {key!r} of only some of the parameters")
        power = 1 if operation.structural else _power(optimizer, key, record)
        move = record.gradient_forward if forward else record.gradient_inverse
        by_key[key] = move(tensors, values, power)
        if not needed <= set(by_key[key]):
            raise _refusal(record, f"the state {key!r} there is not determined by what is known here")
    like = {key: next(e.state[key] for e in given.values() if key in e.state).dtype for key in keys}
    whole = set.intersection(*(set(found) for found in by_key.values())) if by_key else set()
    # with memory of their own: a slice would keep the whole alive
    return {
        role: {key: by_key[key][role].detach().to(like[key], copy=True).contiguous() for key in keys} for role in whole
    }


def _check_elementwise(optimizer: Optimizer, record: MapRecord, given: Entries) -> None:
    """Only what an optimizer keeps for each number of a parameter can follow these numbers."""
    kind = type(optimizer).__name__
    if kind in _ALL_AT_ONCE and given:
        raise _refusal(record, f"{kind} treats all parameters as one vector")
    if kind in _MATRIX_WISE and len(record.map.sources) > 1 and any(entry.state for entry in given.values()):
        raise _refusal(record, f"{kind} computes with each matrix as a whole")
    for misfit in (entry.misfit for entry in given.values() if entry.misfit):
        raise _refusal(record, f"the state {misfit!r} of {kind} does not have the shape of its parameter")


def _is_like_weight(key: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and key != "step"


def _power(optimizer: Optimizer, key: str, record: MapRecord) -> int:
    kind = type(optimizer).__name__
    if (kind, key) in _SCALE_FREE:
        return 0
    if (kind, key) not in _NOT_GRADIENTS:
        if key in _POWERS:
            return _POWERS[key]
        if key.endswith("_sq"):
            return 2
    raise _refusal(record, f"it is not known how the state {key!r} of {kind} scales with the gradient")


def _joint(optimizer: Optimizer, ancestors: Entries, record: MapRecord) -> Entry:
    """One entry for parameters that become one: hyper-parameters and scalars must agree."""
    first = next(iter(ancestors.values()))
    groups = optimizer.param_groups
    mine = {k: v for k, v in groups[first.group].items() if k != "params"}
    for entry in ancestors.values():
        theirs = {k: v for k, v in groups[entry.group].items() if k != "params"}
        differing = [k for k in mine if not _same(mine[k], theirs.get(k))]
        if differing:
            raise _refusal(record, f"their parameter groups differ in {', '.join(differing)}")
        for key in {*first.state, *entry.state}:
            a, b = first.state.get(key), entry.state.get(key)
            if not _is_like_weight(key, a if a is not None else b) and not _same(a, b):
                numbers = [x.item() if isinstance(x, torch.Tensor) and x.numel() == 1 else x for x in (a, b)]
                raise _refusal(record, f"their state {key!r} differs ({numbers[0]} and {numbers[1]})")
    return Entry(first.group, _scalars(first))


def _scalars(entry: Entry) -> dict[str, Any]:
    """Copies of what an entry has besides tensors shaped like the parameter: step counts and the like."""
    found = {key: value for key, value in entry.state.items() if not _is_like_weight(key, value)}
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in found.items()}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.shape == b.shape and bool(torch.equal(a.cpu(), b.cpu()))
    return type(a) is type(b) and bool(a == b)


def _refusal(record: MapRecord, reason: str) -> OptimizerMismatch:
    sources, targets = ", ".join(record.map.sources.values()), ", ".join(record.map.targets.values())
    return OptimizerMismatch(
        f"the optimizer's state of {sources} and of {targets} cannot be moved into each other: {reason}. Module and "
        f"optimizer are as they were. Rewrite without it, and make a new optimizer then."
    )
