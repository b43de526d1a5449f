"""Apply a transformation and record what it did."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import ClassVar, Protocol

from torch.fx import GraphModule

from refold import fx_private
from refold.errors import BrokenTransformation
from refold.fingerprint import fingerprint
from refold.fx_private import find_tensor
from refold.record import call_notes
from refold.record.atomicity import atomically, check_tensors_untouched, naming_written_tensors
from refold.record.change import Change
from refold.record.difference import difference
from refold.record.marks import MARK
from refold.record.outcome import Result, set_result
from refold.record.reversal import finish
from refold.record.snapshot import LaterState, Snapshot
from refold.record.stack import History, attach, history, push, settle
from refold.rewrite.description import recipe_of
from refold.weights.gradients import gradients_forward


class Applicable(Protocol):
    """What is needed of a transformation here; the classes themselves lie above."""

    is_recorded: ClassVar[bool]

    @property
    def signature(self) -> int: ...

    def transform(self, graph_module: GraphModule) -> GraphModule: ...


def apply_transformation(transformation: Applicable, gm: GraphModule, lint_and_recompile: bool) -> GraphModule:
    """Apply and record; if anything is raised on the way, the module is as it was before."""
    expected = history(gm).expected
    if expected is None or call_notes.recorder_of(gm) is not None or expected.is_current(gm):
        return atomically(gm, lambda before: _transform(transformation, gm, lint_and_recompile, before))
    return atomically(gm, lambda _: _apply_to_edited(transformation, gm, lint_and_recompile))


def _apply_to_edited(transformation: Applicable, gm: GraphModule, lint_and_recompile: bool) -> GraphModule:
    """Apply to a graph that is not as the last change left it: it was pickled since, or edited by hand."""
    settle(gm)
    return atomically(gm, lambda before: _transform(transformation, gm, lint_and_recompile, before))


def _transform(transformation: Applicable, gm: GraphModule, lint_and_recompile: bool, before: Snapshot) -> GraphModule:
    label, past, recorder = repr(transformation), history(gm), call_notes.recorder_of(gm)
    call_notes.check_not_inside(gm, label)
    if recorder is not None:
        recorder.check_made(functools.partial(find_tensor, gm))
    unrecorded = not transformation.is_recorded
    with call_notes.recording(label, None if unrecorded else gm) as notes, naming_written_tensors(gm, before, notes):
        notes.released = before.released
        output = transformation.transform(gm)
        if not isinstance(output, GraphModule):
            given = "nothing" if output is None else f"a {type(output).__name__}"
            raise BrokenTransformation(f"{label} returned {given}; transform must return the GraphModule.")
        finish(output, lint_and_recompile)
        if not unrecorded:
            check_tensors_untouched(label, before, output)
            _carry_history(label, gm, output, past, notes)
            _record(transformation, output, before, notes, recorder if output is gm else None)
        note = "" if notes.rewritten or notes.refused else "Nothing in the graph matched."
        set_result(output, Result(label, tuple(notes.rewritten), tuple(notes.refused), note))
        return output


def _carry_history(
    label: str, gm: GraphModule, output: GraphModule, past: History, notes: call_notes.Recording
) -> None:
    """Let the output carry the history that the module came with, whatever the call did to it."""
    carried = history(output)
    if output is gm:
        if carried is not past:
            attach(gm, past)
        return
    if notes.inside or len(carried) not in (0, len(past)):
        raise BrokenTransformation(
            f"{label} returned another module after it called other transformations, so that no record can tell what "
            f"became of the one it was given. Edit the module that is given, or use refold.compose(..., inplace=False)."
        )
    if not carried:
        attach(output, copy.deepcopy(past))


def _record(
    transformation: Applicable,
    output: GraphModule,
    before: Snapshot,
    notes: call_notes.Recording,
    recorder: call_notes.Recording | None,
) -> None:
    """Put what changed on the module's history, or make it part of the change of the call that this one was made in."""
    find = functools.partial(find_tensor, output)
    notes.check_made(find)
    if notes.maps and output is before.tree.root:
        notes.check_sources(before.tensors())
    after = before.later_state(output)
    change = difference(before, after, notes.maps)
    if change is not None and not notes.rewritten:
        notes.rewritten += notes.inside
        notes.rewrote((*change.created, *change.changed), f"{len(change.describe())} edits")
    if change is not None:
        gradients_forward(change.maps, find)
        fx_private.sort_users(output.graph)  # as a copy, a pickle and an undo of a later change have them
    if recorder is not None:
        recorder.absorb(notes, find)
    elif change is not None:
        push(output, _described(change, transformation, before, after, notes), before, after)


def _described(
    change: Change, transformation: Applicable, before: Snapshot, after: LaterState, notes: call_notes.Recording
) -> Change:
    """A change with all that the call says about it."""
    signature = transformation.signature
    metas = zip(after.graph.rows, after.graph.metas, strict=True)
    marked = frozenset([row[1] for row, meta in metas if signature in meta.get(MARK, ())])
    return replace(
        change,
        recipe=recipe_of(transformation),
        signature=signature,
        name=type(transformation).__name__,
        label=repr(transformation),
        fingerprints=_new_tensors(before, after, notes),
        computed_from=notes.computed_from,
        groups=call_notes.groups(),
        marked=marked,
        sites=tuple(notes.rewritten),
    )


def _new_tensors(before: Snapshot, after: LaterState, notes: call_notes.Recording) -> dict[str, str]:
    """Fingerprints of tensors that no weight map accounts for."""
    mapped = {name for record in notes.maps for name in record.map.targets.values()}
    known = set(map(id, before.tree.tensors))
    unmapped = {name: tensor for name, tensor in after.tensors().items() if name not in mapped}
    fresh = {name: fingerprint(tensor) for name, tensor in unmapped.items() if id(tensor) not in known}
    if not fresh or after.root is before.tree.root:
        return fresh
    old = {fingerprint(tensor) for tensor in before.tensors().values()}  # of a module of which this one is a copy
    return {name: mark for name, mark in fresh.items() if mark not in old}
