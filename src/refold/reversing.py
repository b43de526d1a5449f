"""A transformation's own `reverse`, checked: what it gives must be what the record gives."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from refold.atomic import atomically
from refold.errors import BrokenTransformation, ReverseMismatch, WeightsChanged
from refold.expected import ExpectedGraph, by_position, first_difference
from refold.fingerprint import fingerprint
from refold.history import History, attach, history, latest, undo_chosen
from refold.linting import lint
from refold.snapshot import NodeRecord, Snapshot, record_node
from refold.transformation import ReversibleTransformation


@dataclass(frozen=True)
class Outline:
    """What a module computes with: its nodes, by place, and its tensors, by name."""

    nodes: list[NodeRecord]
    tensors: dict[str, str]

    @classmethod
    def of(cls, gm: GraphModule) -> Outline:
        """Outline a module."""
        tensors = {name: fingerprint(t) for name, t in Snapshot.of(gm).tensors().items()}
        return cls(by_position([record_node(node) for node in gm.graph.nodes]), tensors)

    def differs_from(self, other: Outline, with_values: bool) -> str | None:
        """The first difference, as a sentence."""
        difference = first_difference(self.nodes, other.nodes)
        if difference is not None:
            return f"the record has {difference}"
        names = set(self.tensors) ^ set(other.tensors)
        if names:
            return f"the tensors {', '.join(sorted(names))} are in only one of the two"
        changed = [name for name, mark in self.tensors.items() if with_values and other.tensors[name] != mark]
        return f"{', '.join(changed)} come back with other values" if changed else None


def reverse_by_own_means(t: ReversibleTransformation, gm: GraphModule, lint_and_recompile: bool) -> GraphModule:
    """Run a transformation's own reverse and compare it with the record; the record's result, which is exact, stays.
    Only where weights were changed and no map can carry them back is the transformation's own result taken."""
    place = latest(history(gm), lambda change: change.signature == t.signature, repr(t))
    return atomically(gm, lambda now: _reverse_checked(t, gm, place, now, lint_and_recompile))


def _reverse_checked(
    t: ReversibleTransformation, gm: GraphModule, place: int, now: Snapshot, lint_and_recompile: bool
) -> GraphModule:
    theirs = Outline.of(_run(t, gm))
    now.restore(gm)
    try:
        undo_chosen(gm, [place], lint_and_recompile=False)
        _compare(t, Outline.of(gm), theirs, with_values=True)
    except WeightsChanged:
        undo_chosen(gm, [place], weights="original", lint_and_recompile=False)
        _compare(t, Outline.of(gm), theirs, with_values=False)
        rest = history(gm)
        now.restore(gm)
        _run(t, gm)
        attach(gm, History(rest.changes, rest.birth, ExpectedGraph(gm.graph)))
    if lint_and_recompile:
        lint(gm.graph)
        gm.recompile()
    return gm


def _run(t: ReversibleTransformation, gm: GraphModule) -> GraphModule:
    output = t.reverse(gm)
    if output is not gm:
        raise BrokenTransformation(f"the reverse of {t!r} must edit the module it is given and return it.")
    return output


def _compare(t: ReversibleTransformation, record: Outline, theirs: Outline, *, with_values: bool) -> None:
    difference = record.differs_from(theirs, with_values)
    if difference is not None:
        raise ReverseMismatch(
            f"the reverse of {t!r} does not give back what it transformed: {difference}. Nothing was changed. "
            f"Remove that method to use the recorded undo, which is exact, or call refold.undo(gm)."
        )
