"""Transformations one after the other as one, and the two small ones that only compositions need."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch.fx import GraphModule

from refold.record import call_notes
from refold.record.atomicity import atomically
from refold.record.outcome import Refused, Rewritten, result
from refold.record.reversal import finish, undo_chosen
from refold.record.stack import history
from refold.rewrite.reverse_calls import changed_nothing, check_no_marks_without_record, places_of
from refold.rewrite.transformation import ReversibleTransformation, Transformation, check_transformation


class Composition(Transformation):
    """Transformations one after the other, as one call: all or none."""

    is_recorded = False

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
        groups = [number for change in history(gm) for _, number in change.groups]
        with call_notes.grouped(self.signature, 1 + max(groups, default=0)):
            for transformation in self.transformations:
                gm = transformation(gm, lint_and_recompile=False)
                outcome = result(gm)
                rewritten += outcome.rewritten
                refused += outcome.refused
        notes = call_notes.current()
        notes.rewritten += rewritten
        notes.refused += refused
        return gm


class ReversibleComposition(Composition, ReversibleTransformation):
    """A composition of reversible transformations: reversed right to left."""

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Undo every change of this composition."""
        return self._call_reverse(graph_module, lint_and_recompile=False)

    def _call_reverse(self, gm: GraphModule, lint_and_recompile: bool) -> GraphModule:
        gm = gm if self.inplace else copy.deepcopy(gm)
        if not self.transformations:
            return gm
        return atomically(gm, lambda _: self._undo_parts(gm, lint_and_recompile))

    def _undo_parts(self, gm: GraphModule, lint_and_recompile: bool) -> GraphModule:
        """Undo what is recorded; then the parts that only marked nodes take their marks off by themselves."""
        places, recorded = self._places(gm), [part for part in flat(self.transformations) if part.is_recorded]
        parts = [part for part in recorded if isinstance(part, ReversibleTransformation)]
        if places:
            undo_chosen(gm, places, lint_and_recompile=False)
        own = [part for part in reversed(parts) if part.has_own_reverse and part.get_transformed_nodes(gm)]
        for part in own:
            part(gm, lint_and_recompile=False, reverse=True)
        if not places and not own:
            for part in parts:
                check_no_marks_without_record(part, gm)
            return changed_nothing(self, gm)
        return finish(gm, lint_and_recompile)

    def _places(self, gm: GraphModule) -> list[int]:
        """Where the changes to undo stand, the latest first: those of this composition's calls, else those of its
        parts."""
        past, mine = history(gm), self.signature
        called = [i for i in reversed(range(len(past))) if any(group[0] == mine for group in past[i].groups)]
        return called or places_of(gm, {part.signature for part in flat(self.transformations)})


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


class _Unrecorded(ReversibleTransformation):
    """A step of a composition that changes nothing that a record could give back: its reverse is the same step."""

    is_recorded = False
    preserves_computation = True

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """The same again."""
        return self.transform(graph_module)

    def _call_reverse(self, gm: GraphModule, lint_and_recompile: bool) -> GraphModule:
        return self(gm, lint_and_recompile)


class DeepCopy(_Unrecorded):
    """Go on with a deep copy."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return copy.deepcopy(graph_module)


class LintAndRecompile(_Unrecorded):
    """Check the graph and generate its code."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return finish(graph_module, lint_and_recompile=True)
