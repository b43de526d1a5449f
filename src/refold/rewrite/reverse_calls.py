"""What `reverse=True` does: every change of a transformation is taken back, and nothing else.

A `reverse` that an author wrote is run and compared with the record; the record's result, which is exact, stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from refold import fx_private
from refold.errors import BrokenTransformation, NothingToUndo, ReverseMismatch, WeightsChanged
from refold.fingerprint import fingerprint
from refold.record.atomicity import atomically, check_tensors_untouched, naming_written_tensors
from refold.record.call_notes import Recording
from refold.record.nodes import NodeRecord, record_node, same_value
from refold.record.outcome import Result, set_result
from refold.record.outside_edits import ExpectedGraph, by_position, first_difference
from refold.record.reversal import finish, undo_chosen
from refold.record.snapshot import Snapshot
from refold.record.stack import History, attach, history
from refold.rewrite.application import Applicable
from refold.rewrite.description import is_plain


class Reversible(Applicable, Protocol):
    """What is needed of a transformation here; the classes themselves lie above."""

    def reverse(self, graph_module: GraphModule) -> GraphModule: ...

    def get_transformed_nodes(self, graph_module: GraphModule) -> list[Node]: ...


def places_of(gm: GraphModule, signatures: set[int]) -> list[int]:
    """Where the changes of these transformations stand in the history, the latest first."""
    past = history(gm)
    return [i for i in reversed(range(len(past))) if past[i].signature in signatures]


def reverse_by_record(t: Reversible, gm: GraphModule, lint_and_recompile: bool) -> GraphModule:
    """Undo every change of a transformation, the latest first. Where there is none, nothing changes."""
    places = places_of(gm, {t.signature})
    if places:
        return undo_chosen(gm, places, lint_and_recompile=lint_and_recompile)
    check_no_marks_without_record(t, gm)
    return changed_nothing(t, gm)


def reverse_by_own_means(t: Reversible, gm: GraphModule, lint_and_recompile: bool) -> GraphModule:
    """Run a transformation's own reverse, once, and compare it with the record of its latest change, or of all its
    changes; the record's result stays. Only where weights were changed and no map can carry them back is the
    transformation's own result taken. Marks without a record (of a transformation that only marks, or after a commit)
    leave nothing to compare with: what the reverse does is what happens."""
    places = places_of(gm, {t.signature})
    if not places and not t.get_transformed_nodes(gm):
        return changed_nothing(t, gm)
    return atomically(gm, lambda now: finish(_reverse(t, gm, places, now), lint_and_recompile))


def check_no_marks_without_record(t: Reversible, gm: GraphModule) -> None:
    """Raise if a transformation marked nodes of this module and no record can take that back."""
    marked = [node.name for node in t.get_transformed_nodes(gm)]
    if marked:
        raise NothingToUndo(
            f"{t!r} transformed {', '.join(marked[:4])}, but its record is gone: the history was committed, or the "
            f"module was rebuilt from its graph (refold.detach before and refold.attach after that keep the history)."
        )


def changed_nothing(t: Applicable, gm: GraphModule) -> GraphModule:
    """Say in the module's result that a reverse found nothing of its own."""
    set_result(gm, Result(repr(t), note="Nothing of it is in this module, so nothing was reversed."))
    return gm


# --- a reverse of one's own, compared with the record ---------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """What a module computes with: its nodes, by place, its tensors, by name, and the modules that nodes refer to, each
    with its class and its settings."""

    nodes: list[NodeRecord]
    tensors: dict[str, str]
    modules: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, gm: GraphModule) -> Summary:
        """Summarize a module."""
        tensors = {name: fingerprint(t) for name, t in Snapshot.of(gm).tensors().items()}
        used = tuple(f"{node.target}." for node in gm.graph.nodes if node.op in ("call_module", "get_attr"))
        modules = {path: _facts(m) for path, m in fx_private.walk_modules(gm) if f"{path}.".startswith(used)}
        nodes = [_with_plain_numbers(record_node(node)) for node in gm.graph.nodes]
        return cls(by_position(nodes), tensors, modules)

    def differs_from(self, other: Summary, with_values: bool) -> str | None:
        """The first difference, as a sentence."""
        difference = first_difference(self.nodes, other.nodes)
        if difference is not None:
            return f"the record has {difference}"
        names = set(self.tensors) ^ set(other.tensors)
        if names:
            return f"the tensors {', '.join(sorted(names))} are in only one of the two"
        difference = next(filter(None, (self._module_differs(other, path) for path in self.modules)), None)
        if difference is not None:
            return difference
        changed = [name for name, mark in self.tensors.items() if with_values and other.tensors[name] != mark]
        return f"{', '.join(changed)} come back with other values" if changed else None

    def _module_differs(self, other: Summary, path: str) -> str | None:
        mine, theirs = self.modules[path], other.modules.get(path, {"class": None})
        if mine["class"] is not theirs["class"]:
            kinds = [getattr(facts["class"], "__name__", "nothing") for facts in (mine, theirs)]
            return f"the record has {kinds[0]} at {path} where {kinds[1]} was found"
        names = [name for name in {**mine, **theirs} if not same_value(mine.get(name), theirs.get(name))]
        return f"{path} comes back with another {', '.join(names)}" if names else None


def _facts(module: nn.Module) -> dict[str, Any]:
    """The class of a module and its settings; the mode is none, and of what is not plain data only the kind counts."""
    settings = {name: _plain_number(_plain(value)) for name, value in fx_private.plain_attributes(module).items()}
    settings.pop("training", None)
    return {**settings, "class": GraphModule if isinstance(module, GraphModule) else type(module)}


def _plain(value: Any) -> Any:
    if is_plain(value):
        return value
    return (type(value), len(value)) if isinstance(value, dict | list | set | tuple) else type(value)


def _with_plain_numbers(record: NodeRecord) -> NodeRecord:
    """Numbers that compare equal are equal here: an author may compute 3 back as 3.0. The record's own value stays."""
    args, kwargs = map_aggregate((record.args, record.kwargs), _plain_number)
    return replace(record, args=args, kwargs=kwargs)


def _plain_number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _reverse(t: Reversible, gm: GraphModule, places: Sequence[int], now: Snapshot) -> GraphModule:
    with naming_written_tensors(gm, now, Recording(f"the reverse of {t!r}")):
        _run(t, gm, now)
    if not places:
        return _with_graph_as_it_is(gm, history(gm))
    theirs, differences = Summary.of(gm), []
    for chosen in dict.fromkeys((tuple(places[:1]), tuple(places))):
        now.restore(gm)
        differences.append(_undo_as_they_did(t, gm, chosen, theirs, now))
        if differences[-1] is None:
            break
    else:
        raise ReverseMismatch(
            f"the reverse of {t!r} does not give back what it transformed: {differences[0]}. Nothing was changed. "
            f"Remove that method to use the recorded undo, which is exact, or call refold.undo(gm)."
        )
    return gm


def _undo_as_they_did(
    t: Reversible, gm: GraphModule, chosen: tuple[int, ...], theirs: Summary, now: Snapshot
) -> str | None:
    """Undo some changes by their records; how that differs from what the transformation's own reverse gave, if it
    does."""
    try:
        undo_chosen(gm, list(chosen), lint_and_recompile=False)
        return Summary.of(gm).differs_from(theirs, with_values=True)
    except WeightsChanged:
        undo_chosen(gm, list(chosen), weights="original", lint_and_recompile=False)
        difference = Summary.of(gm).differs_from(theirs, with_values=False)
        if difference is None:
            _take_theirs(t, gm, now)
        return difference


def _take_theirs(t: Reversible, gm: GraphModule, now: Snapshot) -> None:
    """Their result instead of the record's, with the history and the modes that the record gave."""
    rest, modes = history(gm), {path: module.training for path, module in fx_private.walk_modules(gm)}
    now.restore(gm)
    _run(t, gm, now)
    for path, module in fx_private.walk_modules(gm):
        fx_private.set_plain_attribute(module, "training", modes.get(path, module.training))
    _with_graph_as_it_is(gm, rest)


def _with_graph_as_it_is(gm: GraphModule, past: History) -> GraphModule:
    """Give a module a history that expects the graph that is there."""
    edits = () if past.expected is None else past.expected.edits
    return attach(gm, History(past.changes, past.initial_order, ExpectedGraph(gm.graph, edits=edits)))


def _run(t: Reversible, gm: GraphModule, now: Snapshot) -> None:
    if t.reverse(gm) is not gm:
        raise BrokenTransformation(f"the reverse of {t!r} must edit the module it is given and return it.")
    check_tensors_untouched(f"the reverse of {t!r}", now, gm)
