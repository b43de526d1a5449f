"""A transformation's own `reverse`, checked: what it gives must be what the record gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import GraphModule

from refold import fx_private
from refold.atomic import atomically
from refold.errors import BrokenTransformation, ReverseMismatch, WeightsChanged
from refold.expected import ExpectedGraph, by_position, first_difference
from refold.fingerprint import fingerprint
from refold.history import History, attach, history, latest, undo_chosen
from refold.linting import lint
from refold.recipes import is_plain
from refold.recording import Recording
from refold.snapshot import NodeRecord, Snapshot, record_node, same_value
from refold.transformation import ReversibleTransformation
from refold.untouched import check_tensors_untouched, telling_what_was_written


@dataclass(frozen=True)
class Outline:
    """What a module computes with: its nodes, by place, its tensors, by name, and the modules that nodes refer to, each
    with its class and its settings."""

    nodes: list[NodeRecord]
    tensors: dict[str, str]
    modules: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, gm: GraphModule) -> Outline:
        """Outline a module."""
        tensors = {name: fingerprint(t) for name, t in Snapshot.of(gm).tensors().items()}
        used = tuple(f"{node.target}." for node in gm.graph.nodes if node.op in ("call_module", "get_attr"))
        modules = {path: _facts(m) for path, m in fx_private.walk_modules(gm) if f"{path}.".startswith(used)}
        return cls(by_position([record_node(node) for node in gm.graph.nodes]), tensors, modules)

    def differs_from(self, other: Outline, with_values: bool) -> str | None:
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

    def _module_differs(self, other: Outline, path: str) -> str | None:
        mine, theirs = self.modules[path], other.modules.get(path, {"class": None})
        if mine["class"] is not theirs["class"]:
            kinds = [getattr(facts["class"], "__name__", "nothing") for facts in (mine, theirs)]
            return f"the record has {kinds[0]} at {path} where {kinds[1]} was found"
        names = [name for name in {**mine, **theirs} if not same_value(mine.get(name), theirs.get(name))]
        return f"{path} comes back with another {', '.join(names)}" if names else None


def _facts(module: nn.Module) -> dict[str, Any]:
    """The class of a module and its settings; the mode is none, and of what is not plain data only the kind counts."""
    settings = {name: _plain(value) for name, value in fx_private.plain_attributes(module).items()}
    settings.pop("training", None)
    return {**settings, "class": GraphModule if isinstance(module, GraphModule) else type(module)}


def _plain(value: Any) -> Any:
    if is_plain(value):
        return value
    return (type(value), len(value)) if isinstance(value, dict | list | set | tuple) else type(value)


def reverse_by_own_means(t: ReversibleTransformation, gm: GraphModule, lint_and_recompile: bool) -> GraphModule:
    """Run a transformation's own reverse and compare it with the record; the record's result, which is exact, stays.
    Only where weights were changed and no map can carry them back is the transformation's own result taken."""
    place = latest(history(gm), lambda change: change.signature == t.signature, repr(t))
    return atomically(gm, lambda now: _reverse_checked(t, gm, place, now, lint_and_recompile))


def _reverse_checked(
    t: ReversibleTransformation, gm: GraphModule, place: int, now: Snapshot, lint_and_recompile: bool
) -> GraphModule:
    name = f"the reverse of {t!r}"
    with telling_what_was_written(gm, now, Recording(name)):
        theirs = Outline.of(_run(t, gm))
        check_tensors_untouched(name, now, gm)
    now.restore(gm)
    try:
        undo_chosen(gm, [place], lint_and_recompile=False)
        _compare(t, Outline.of(gm), theirs, with_values=True)
    except WeightsChanged:
        undo_chosen(gm, [place], weights="original", lint_and_recompile=False)
        _compare(t, Outline.of(gm), theirs, with_values=False)
        rest, modes = history(gm), {path: module.training for path, module in fx_private.walk_modules(gm)}
        now.restore(gm)
        _run(t, gm)
        for path, module in fx_private.walk_modules(gm):
            fx_private.set_plain_attribute(module, "training", modes.get(path, module.training))
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
