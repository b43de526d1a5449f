"""The transformations people know: apply, reverse, compose. Recording, atomicity and undo are the framework's work."""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace

from torch.fx import GraphModule, Node

from refold import fx_private, recording
from refold.atomic import atomically
from refold.change import Change
from refold.difference import difference
from refold.errors import BrokenTransformation, NotATransformation
from refold.fingerprint import fingerprint
from refold.gradients import gradients_forward
from refold.history import (
    History,
    attach,
    check_graph_module,
    find_tensor,
    history,
    latest,
    push,
    undo_chosen,
    undo_signature,
)
from refold.linting import lint
from refold.recipes import recipe_of
from refold.result import Refused, Result, Rewritten, result, set_result
from refold.settings import check_settings
from refold.signature import digest
from refold.snapshot import Look, Snapshot
from refold.untouched import check_tensors_untouched, telling_what_was_written

_MARK = "refold_transformed_by"


class Transformation(ABC):
    """Edits a graph. Subclasses write `transform`; it may edit as it likes, with any of torch.fx's own means, but must
    never write into a tensor that was there before. What it did is derived, recorded on the module, and can be undone.
    """

    preserves_computation: bool = False
    """A claim that the result computes the same; `refold.verify` grades it."""

    def __post_init__(self) -> None:
        """Check the settings; a transformation that is a dataclass calls this when it is made."""
        check_settings(self)

    @abstractmethod
    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Edit a graph module and return it (or another one)."""

    def __call__(self, graph_module: GraphModule, lint_and_recompile: bool = True) -> GraphModule:
        """Apply the transformation; if anything is raised on the way, the module is as it was before."""
        return _apply(self, check_graph_module(graph_module), lint_and_recompile)

    @property
    def signature(self) -> int:
        """A number that is equal for equal transformations (class and settings), in any process."""
        return digest(self)

    def __repr__(self) -> str:
        settings = ", ".join(f"{k}={v!r}" for k, v in vars(self).items())
        return f"{type(self).__name__}({settings})"

    def mark_as_transformed(self, node: Node) -> None:
        """Note on a node that this transformation made or changed it."""
        marks, signature = node.meta.get(_MARK, ()), _signature_during_call(self)
        if signature not in marks:
            node.meta[_MARK] = (*marks, signature)

    def transformed(self, node: Node) -> bool:
        """Whether this transformation made or changed a node."""
        return _marked(node, self.signature)

    def get_transformed_nodes(self, graph_module: GraphModule) -> list[Node]:
        """The nodes that this transformation made or changed."""
        nodes = check_graph_module(graph_module).graph.nodes
        signature, recorded = self.signature, _recorded_marks(graph_module, self.signature)
        return [node for node in nodes if _is_marked(node, signature, recorded)]


class ReversibleTransformation(Transformation):
    """A transformation that can be asked to reverse itself. The default `reverse` undoes its latest recorded change; a
    `reverse` of one's own is run and compared with the record."""

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Undo this transformation's latest change."""
        return undo_signature(graph_module, self.signature, repr(self), lint_and_recompile=False)

    def __call__(
        self, graph_module: GraphModule, lint_and_recompile: bool = True, reverse: bool = False
    ) -> GraphModule:
        """Apply the transformation, or reverse it."""
        if not reverse:
            return super().__call__(graph_module, lint_and_recompile)
        gm = check_graph_module(graph_module)
        if type(self).reverse is ReversibleTransformation.reverse:
            return undo_signature(gm, self.signature, repr(self), lint_and_recompile=lint_and_recompile)
        from refold.reversing import reverse_by_own_means

        return reverse_by_own_means(self, gm, lint_and_recompile)

    def mark_as_restored(self, node: Node) -> None:
        """Take this transformation's mark off a node."""
        if not self.transformed(node):
            raise ValueError(
                f"{node.name} was not marked as transformed by {self!r}, so it cannot be marked as restored."
            )
        left = tuple(mark for mark in node.meta.get(_MARK, ()) if mark != self.signature)
        node.meta[_MARK] = (*left, -self.signature)  # an explicit 'no longer', stronger than the record


def _signature_during_call(transformation: Transformation) -> int:
    known = recording.current().signatures
    if id(transformation) not in known:
        known[id(transformation)] = transformation.signature
    return known[id(transformation)]


def _marked(node: Node, signature: int) -> bool:
    owner = node.graph.owning_module
    return _is_marked(node, signature, frozenset() if owner is None else _recorded_marks(owner, signature))


def _is_marked(node: Node, signature: int, recorded: frozenset[str]) -> bool:
    marks = node.meta.get(_MARK, ())
    return signature in marks or (node.name in recorded and -signature not in marks)


def _recorded_marks(gm: GraphModule, signature: int) -> frozenset[str]:
    """Marks as the history knows them: node metadata is lost by pickling."""
    found = [change.marked for change in history(gm) if change.signature == signature]
    return frozenset().union(*found)


def check_transformation(thing: object) -> Transformation:
    """The thing, if it is a transformation."""
    if isinstance(thing, Transformation):
        return thing
    if isinstance(thing, type) and issubclass(thing, Transformation):
        raise NotATransformation(
            f"the class {thing.__name__} was given where an instance is needed: {thing.__name__}()."
        )
    raise NotATransformation(f"a refold.Transformation is needed, and a {type(thing).__name__} was given.")


# --- applying ----------------------------------------------------------------------------------------------------


def _apply(transformation: Transformation, gm: GraphModule, lint_and_recompile: bool) -> GraphModule:
    return atomically(gm, lambda before: _transform(transformation, gm, lint_and_recompile, before))


def _transform(
    transformation: Transformation, gm: GraphModule, lint_and_recompile: bool, before: Snapshot
) -> GraphModule:
    label, past, recorder = repr(transformation), history(gm), recording.recorder_of(gm)
    recording.check_not_inside(gm, label)
    if recorder is not None:
        recorder.check_made(functools.partial(find_tensor, gm))
    unrecorded = isinstance(transformation, Unrecorded)
    with recording.recording(label, None if unrecorded else gm) as notes, telling_what_was_written(gm, before, notes):
        notes.ledger = before.ledger
        output = transformation.transform(gm)
        if not isinstance(output, GraphModule):
            given = "nothing" if output is None else f"a {type(output).__name__}"
            raise BrokenTransformation(f"{label} returned {given}; transform must return the GraphModule.")
        if lint_and_recompile:
            lint(output.graph)
            output.recompile()
        if not unrecorded:
            check_tensors_untouched(label, before, output)
            _carry_history(label, gm, output, past, notes)
            _record(transformation, output, before, notes, recorder if output is gm else None)
        outcome = Result(label, tuple(notes.rewritten), tuple(notes.refused), _note(notes))
        set_result(output, outcome)
        return output


def _carry_history(label: str, gm: GraphModule, output: GraphModule, past: History, notes: recording.Recording) -> None:
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


def _note(notes: recording.Recording) -> str:
    return "" if notes.rewritten or notes.refused else "Nothing in the graph matched."


def _record(
    transformation: Transformation,
    output: GraphModule,
    before: Snapshot,
    notes: recording.Recording,
    recorder: recording.Recording | None,
) -> None:
    """Put what changed on the module's history, or make it part of the change of the call that this one was made in."""
    find = functools.partial(find_tensor, output)
    notes.check_made(find)
    if notes.maps and output is before.tree.root:
        notes.check_sources(before.tensors())
    after = before.again(output)
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
    change: Change, transformation: Transformation, before: Snapshot, after: Look, notes: recording.Recording
) -> Change:
    """A change with all that the call says about it."""
    signature = transformation.signature
    metas = zip(after.graph.rows, after.graph.metas, strict=True)
    marked = frozenset([row[1] for row, meta in metas if _MARK in meta and signature in meta[_MARK]])
    return replace(
        change,
        recipe=recipe_of(transformation),
        signature=signature,
        name=type(transformation).__name__,
        label=repr(transformation),
        prints=_new_tensors(before, after, notes),
        groups=recording.groups(),
        marked=marked,
        sites=tuple(notes.rewritten),
    )


def _new_tensors(before: Snapshot, after: Look, notes: recording.Recording) -> dict[str, str]:
    """Fingerprints of tensors that no weight map accounts for."""
    mapped = {name for record in notes.maps for name in record.map.targets.values()}
    unmapped = {name: tensor for name, tensor in after.tensors().items() if name not in mapped}
    if not unmapped:
        return {}
    known = set(map(id, before.tree.tensors))
    copied = after.root is not before.tree.root
    if copied:
        old_prints = {fingerprint(tensor) for tensor in before.tensors().values()}
    fresh: dict[str, str] = {}
    for name, tensor in unmapped.items():
        if id(tensor) in known:
            continue
        mark = fingerprint(tensor)
        if not (copied and mark in old_prints):
            fresh[name] = mark
    return fresh


# --- composition -------------------------------------------------------------------------------------------------


class Unrecorded:
    """Marks transformations that have no change of their own to record."""


class Composition(Unrecorded, Transformation):
    """Transformations one after the other, as one call: all or none."""

    def __init__(self, *transformations: Transformation, inplace: bool = True) -> None:
        self.transformations = transformations
        self.inplace = inplace

    @property
    def preserves_computation(self) -> bool:  # type: ignore[override]
        """Whether every one of them does."""
        return all(t.preserves_computation for t in self.transformations)

    def __repr__(self) -> str:
        inside = [repr(t) for t in self.transformations] + ([] if self.inplace else ["inplace=False"])
        return f"compose({', '.join(inside)})"

    def transform(self, graph_module: GraphModule) -> GraphModule:
        gm = graph_module if self.inplace else copy.deepcopy(graph_module)
        rewritten: list[Rewritten] = []
        refused: list[Refused] = []
        with recording.grouped(self.signature, _next_group(gm)):
            for transformation in self.transformations:
                gm = transformation(gm, lint_and_recompile=False)
                outcome = result(gm)
                rewritten += outcome.rewritten
                refused += outcome.refused
        notes = recording.current()
        notes.rewritten += rewritten
        notes.refused += refused
        return gm


def _next_group(gm: GraphModule) -> int:
    return 1 + max((number for change in history(gm) for _, number in change.groups), default=0)


class ReversibleComposition(Composition, ReversibleTransformation):
    """A composition of reversible transformations: reversed right to left."""

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Undo the changes of this composition's latest call."""
        return self._undo(graph_module, lint_and_recompile=False)

    def __call__(
        self, graph_module: GraphModule, lint_and_recompile: bool = True, reverse: bool = False
    ) -> GraphModule:
        if not reverse:
            return Transformation.__call__(self, graph_module, lint_and_recompile)
        return self._undo(check_graph_module(graph_module), lint_and_recompile)

    def _undo(self, gm: GraphModule, lint_and_recompile: bool) -> GraphModule:
        if not self.transformations:
            return gm if self.inplace else copy.deepcopy(gm)
        places = self._places(gm)
        gm = gm if self.inplace else copy.deepcopy(gm)
        return undo_chosen(gm, places, lint_and_recompile=lint_and_recompile)

    def _places(self, gm: GraphModule) -> list[int]:
        """Where the changes to undo stand: those of the latest call, else each part's own latest change."""
        past, mine = history(gm), self.signature
        calls = [group for change in past for group in change.groups if group[0] == mine]
        if calls:
            return [i for i in reversed(range(len(past))) if calls[-1] in past[i].groups]
        places: list[int] = []
        for part in reversed(flat(self.transformations)):
            fitting = [i for i, c in enumerate(past) if c.signature == part.signature and i not in places]
            places += fitting[-1:]
        if not places:
            latest(past, lambda change: False, repr(self))
        return places


def flat(transformations: Iterable[Transformation]) -> list[Transformation]:
    """The parts of compositions, and all others as they are, in order."""
    parts: list[Transformation] = []
    for t in transformations:
        parts += flat(t.transformations) if isinstance(t, Composition) else [t]
    return parts


def compose(*transformations: Transformation, inplace: bool = True) -> Transformation | ReversibleTransformation:
    """One transformation that applies these from left to right, and reverses them from right to left if all can be.
    `inplace=False` works on a deep copy and leaves its argument untouched, in both directions."""
    for t in transformations:
        check_transformation(t)
    if all(isinstance(t, ReversibleTransformation) for t in transformations):
        return ReversibleComposition(*transformations, inplace=inplace)
    return Composition(*transformations, inplace=inplace)


class DeepCopy(Unrecorded, ReversibleTransformation):
    """Go on with a deep copy."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return copy.deepcopy(graph_module)

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """A copy has nothing to give back."""
        return copy.deepcopy(graph_module)

    def __call__(
        self, graph_module: GraphModule, lint_and_recompile: bool = True, reverse: bool = False
    ) -> GraphModule:
        return Transformation.__call__(self, graph_module, lint_and_recompile)


class LintAndRecompile(Unrecorded, ReversibleTransformation):
    """Check the graph and generate its code."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        lint(graph_module.graph)
        graph_module.recompile()
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """The same again."""
        return self.transform(graph_module)

    def __call__(
        self, graph_module: GraphModule, lint_and_recompile: bool = True, reverse: bool = False
    ) -> GraphModule:
        return Transformation.__call__(self, graph_module, lint_and_recompile)
