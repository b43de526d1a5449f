"""The stack of changes a module carries with it: printing, undoing, committing, detaching."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from refold import fx_private, recording
from refold.atomic import atomically
from refold.change import Change
from refold.errors import BrokenTransformation, GraphEdited, NotAGraphModule, NothingToUndo, OutOfOrder, WeightsChanged
from refold.expected import ExpectedGraph
from refold.fingerprint import fingerprint
from refold.gradients import gradients_back
from refold.linting import lint
from refold.releasing import Ledger
from refold.restoring import Birth, find_tensor, put_back
from refold.snapshot import Look, Snapshot
from refold.weights import MapRecord, NoInverse, Tensors

_WAYS_OUT = (
    "Pass weights='original' to get the weights of the moment before the rewrite, or refold.commit(gm) to keep it."
)
_MOST_LINES = 20


class History(nn.Module):
    """What was done to a module, oldest first. It is a child of the module, so it goes where the module goes; it
    holds no parameter and no buffer. It is never changed: a new one takes its place."""

    def __init__(
        self, changes: tuple[Change, ...] = (), birth: Birth | None = None, expected: ExpectedGraph | None = None
    ) -> None:
        super().__init__()
        self.changes = changes
        self.birth = birth
        self.expected = expected

    def __len__(self) -> int:
        return len(self.changes)

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    def __getitem__(self, index: int) -> Change:
        return self.changes[index]

    def __bool__(self) -> bool:
        return bool(self.changes)

    @property
    def nbytes(self) -> int:
        """The bytes of tensors and corrections that are held so that everything can be undone."""
        return sum(change.nbytes for change in self.changes)

    def __str__(self) -> str:
        if not self.changes:
            return "no changes"
        lines = []
        for i, change in enumerate(self.changes, 1):
            lines += [f"{i}. {change.label}  [{change.nbytes} bytes held]", *(f"   {x}" for x in _first_lines(change))]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        import html

        rows = "".join(
            f"<tr><td>{i}</td><td>{html.escape(c.label)}</td><td>{c.nbytes}</td>"
            f"<td><pre>{html.escape(chr(10).join(_first_lines(c)))}</pre></td></tr>"
            for i, c in enumerate(self.changes, 1)
        )
        return f"<table><tr><th></th><th>transformation</th><th>bytes held</th><th>what changed</th></tr>{rows}</table>"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "changes": tuple(change.without_metas() for change in self.changes)}

    def __deepcopy__(self, memo: dict[int, Any]) -> History:
        return History(
            copy.deepcopy(self.changes, memo), copy.deepcopy(self.birth, memo), copy.deepcopy(self.expected, memo)
        )


def _first_lines(change: Change) -> list[str]:
    """What a change did, but no more than people read; `change.describe()` has all of it."""
    lines = change.describe()
    if len(lines) <= _MOST_LINES:
        return lines
    return [*lines[:_MOST_LINES], f"… and {len(lines) - _MOST_LINES} more lines: change.describe() has them all"]


def check_graph_module(gm: object) -> GraphModule:
    """The module, if it is one that can be transformed."""
    if isinstance(gm, GraphModule):
        return gm
    what = f"the class {gm.__name__}" if isinstance(gm, type) else f"a {type(gm).__name__}"
    advice = "Capture it first: gm = refold.trace(model, *example_inputs), or torch.fx.symbolic_trace(model)."
    raise NotAGraphModule(f"a torch.fx.GraphModule is needed, and {what} was given. {advice}")


def history(gm: GraphModule) -> History:
    """The history that a module carries; an empty one if nothing was done to it."""
    found = fx_private.table(check_graph_module(gm), "_modules").get(fx_private.HISTORY_CHILD)
    return found if isinstance(found, History) else History()


def push(gm: GraphModule, change: Change, before: Snapshot, after: Look) -> None:
    """Put a change on a module's history; it was derived from the photograph before and the look at it after."""
    past = history(gm)
    birth = past.birth or Birth(tuple(before.nodes), users=before.unsorted_users())
    birth = birth.with_tables_of(change)
    attach(gm, History((*past.changes, change), birth, ExpectedGraph(gm.graph, after.graph.rows)))


def attach(gm: GraphModule, past: History) -> GraphModule:
    """Give a module a history, for instance one that `detach` took before the module was rebuilt from its graph."""
    children = fx_private.table(check_graph_module(gm), "_modules")
    children.pop(fx_private.HISTORY_CHILD, None)
    if past.changes:
        children[fx_private.HISTORY_CHILD] = past
    return gm


def detach(gm: GraphModule) -> History:
    """Take the history off a module, to keep it while the module is retraced or rebuilt; `attach` puts it back."""
    past = history(gm)
    attach(gm, History())
    return past


def commit(gm: GraphModule) -> GraphModule:
    """Drop all undo records: what was done stays, and can no longer be undone."""
    detach(gm)
    return gm


def undo(gm: GraphModule, n: int | None = 1, *, weights: str = "carry", lint_and_recompile: bool = True) -> GraphModule:
    """Undo the latest `n` changes (None: all of them) and return the module.

    Weights that were changed since are carried back through the rewrites' inverse maps; `weights='original'` gives
    back those of the moment before instead, where they are still known.
    """
    past = history(gm)
    wanted = len(past) if n is None else n
    if not past:
        raise NothingToUndo("this module carries no changes: it was never transformed, or its history was committed.")
    if not isinstance(wanted, int) or not 1 <= wanted <= len(past):
        raise NothingToUndo(
            f"{n!r} changes cannot be undone: the module carries {len(past)} (None undoes all of them)."
        )
    chosen = list(range(len(past) - 1, len(past) - 1 - wanted, -1))
    return undo_chosen(gm, chosen, weights=weights, lint_and_recompile=lint_and_recompile)


def undo_signature(gm: GraphModule, signature: int, label: str, **settings: Any) -> GraphModule:
    """Undo the latest change that a transformation with this signature made."""
    return undo_chosen(gm, [latest(history(gm), lambda change: change.signature == signature, label)], **settings)


def latest(past: History, fits: Callable[[Change], bool], label: str) -> int:
    """The place of the latest change that fits."""
    found = [i for i, change in enumerate(past.changes) if fits(change)]
    if found:
        return found[-1]
    known = ", ".join(change.label for change in past.changes) or "nothing"
    raise NothingToUndo(f"{label} has nothing to reverse on this module; its history holds: {known}.")


def undo_chosen(
    gm: GraphModule, chosen: list[int], *, weights: str = "carry", lint_and_recompile: bool = True
) -> GraphModule:
    """Undo changes by their places in the history, one after the other, all or none."""
    if weights not in ("carry", "original"):
        raise ValueError(f"weights must be 'carry' or 'original', not {weights!r}")
    recording.check_not_inside(gm, "undo")
    running = recording.recorder_of(gm)
    if running is not None:
        raise BrokenTransformation(
            f"{running.label} undoes changes of the module that it is transforming, which no record of it can hold. "
            f"Undo them before it is called, or after."
        )
    return atomically(gm, lambda before: _undo_all(gm, chosen, weights, lint_and_recompile, before.ledger))


def _undo_all(
    gm: GraphModule, chosen: list[int], weights: str, lint_and_recompile: bool, ledger: Ledger
) -> GraphModule:
    expected = history(gm).expected
    if expected is not None:
        expected.check(gm)
    for index in chosen:
        _undo_one(gm, index, weights, ledger)
    if lint_and_recompile:
        lint(gm.graph)
        gm.recompile()
    return gm


def _undo_one(gm: GraphModule, index: int, weights: str, ledger: Ledger) -> None:
    past = history(gm)
    change = past.changes[index]
    blockers = [later.label for later in past.changes[index + 1 :] if change.conflicts_with(later)]
    if blockers:
        raise OutOfOrder(
            f"{change.label} cannot be reversed before {', '.join(blockers)}: they build on what it changed. "
            f"Reverse {'that' if len(blockers) == 1 else 'those'} first (the latest first)."
        )
    if weights == "carry":
        _check_unmapped_weights(gm, change)
    tensors = _recover(gm, change, weights, ledger)
    assert past.birth is not None
    put_back(gm, change, tensors, past.birth)
    rest = (*past.changes[:index], *past.changes[index + 1 :])
    attach(gm, History(rest, past.birth, ExpectedGraph(gm.graph)))


def _check_unmapped_weights(gm: GraphModule, change: Change) -> None:
    """Weights that a change made without saying how they come back must not have been changed since."""
    for name, mark in change.prints.items():
        tensor = find_tensor(gm, name)
        if tensor is None or fingerprint(tensor) != mark:
            raise WeightsChanged(
                f"{name}, which {change.label} made, was changed since, and the transformation does not say how to "
                f"carry that back. {_WAYS_OUT}"
            )


def _recover(gm: GraphModule, change: Change, weights: str, ledger: Ledger) -> dict[str, torch.Tensor]:
    """The tensors that the change's weight maps give back and those that it passed on, by the names they had before it;
    live originals where they still fit."""
    found: dict[str, torch.Tensor] = {}
    for record in reversed(change.maps):  # a map may have read what an earlier one of the same change made
        names = record.map.targets
        current = {r: found.pop(n) if n in found else _target(gm, n, change.label) for r, n in names.items()}
        try:
            values = record.recover(current, weights)
        except NoInverse as reason:
            layer = ", ".join(record.map.targets.values())
            raise WeightsChanged(
                f"{layer} cannot be carried back through {change.label}: {reason}. {_WAYS_OUT}"
            ) from None
        grads = gradients_back(record, current, values)
        _release(record, current, values, ledger)
        revived = {role: record.specs[role].revive(value) for role, value in values.items()}
        for role, tensor in revived.items():
            if role in grads and tensor.requires_grad:
                tensor.grad = grads[role].to(tensor.dtype)
            found[record.map.sources[role]] = tensor
        del values  # slices keep the memory of the whole
        _part(record, current, revived, ledger)
    return found | {n: _target(gm, now, change.label) for n, now in change.passed.items()}


def _part(record: MapRecord, current: Tensors, revived: Tensors, ledger: Ledger) -> None:
    """Give recovered slices memory of their own, and let go of the whole, which can be put together again from them."""
    _unshare(revived.values())
    old, new = (sum(t.numel() for t in tensors.values()) for tensors in (revived, current))
    for role in current if record.map.operation.structural and old == new else ():
        ledger.release(current[role], lambda role=role: record.map.operation.forward(revived)[role].detach())  # type: ignore[misc]


def _release(record: MapRecord, current: Tensors, values: Tensors, ledger: Ledger) -> None:
    """Let go of the memory of folded weights that can be folded again from the recovered ones."""
    for role in current if record.residues and record.is_untouched(current) else ():
        ledger.release(current[role], lambda role=role: record.map.operation.forward(values)[role])  # type: ignore[misc]


def _target(gm: GraphModule, name: str, label: str) -> torch.Tensor:
    """A tensor that a map made or that was passed on, as it is now."""
    tensor = find_tensor(gm, name)
    if tensor is None:
        raise GraphEdited(f"{name}, which holds weights since {label}, is no longer in the module.")
    return tensor


def _unshare(tensors: Iterable[torch.Tensor]) -> None:
    """Give every restored tensor memory of its own, one after the other: a slice would keep the whole alive."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() > tensor.numel() * tensor.element_size():
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
