"""Doing again what was done: a recipe's transformations on a module without weights, at the recorded sites only."""

from __future__ import annotations

import keyword
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from refold import fx_private
from refold.errors import GraphEdited, SaveError
from refold.graph.view import GraphView
from refold.record.copies import meta_copy
from refold.record.nodes import MISSING
from refold.record.reversal import undo
from refold.record.stack import History, attach, history, settle
from refold.rewrite.editor import Editor
from refold.rewrite.registry import transformation_from
from refold.rewrite.rule import Rewrite, Site
from refold.rewrite.transformation import Transformation


class Replayed(Rewrite):
    """A rewrite at the sites where it was done before. What depends on weights' values was decided then: on a module
    without weights it cannot be decided again."""

    is_stand_in = True

    def __init__(self, inner: Rewrite, sites: Iterable[tuple[str, ...]]) -> None:
        self.inner = inner
        self.left = Counter(sites)
        """How often each place is still to be rewritten, by the names of its nodes."""

    @property
    def signature(self) -> int:
        """That of the rewrite itself."""
        return self.inner.signature

    def __repr__(self) -> str:
        return repr(self.inner)

    def find(self, view: GraphView) -> Iterator[Site]:
        for item in self.inner.find(view):
            if isinstance(item, Site) and self.left[_names(item)] > 0:
                yield item

    def rewrite(self, site: Site, edit: Editor) -> None:
        self.left[_names(site)] -= 1
        self.inner.rewrite(site, edit)

    def transform(self, graph_module: GraphModule) -> GraphModule:
        super().transform(graph_module)
        missed = [" ".join(names) for names, count in self.left.items() if count > 0]
        if missed:
            raise SaveError(f"{self.inner!r} does not find the place {missed[0]} again.")
        return graph_module


def _names(site: Site) -> tuple[str, ...]:
    return tuple(node.name for node in site.nodes)


def base_of(gm: GraphModule) -> GraphModule:
    """What a module was before its history began, without weights, in the mode in which it was rewritten."""
    empty, past = meta_copy(gm), history(gm)
    if not past:
        return empty
    settle(empty)
    edits = history(empty).expected.edits  # type: ignore[union-attr]
    if edits:
        raise GraphEdited(
            f"the graph was edited outside Refold: expected {edits[0].what}. No recipe leads to such a graph. Take the "
            f"edit back, or make it in a transformation."
        )
    if empty.training != past[0].training:
        set_modes(empty, {path for path, _ in fx_private.walk_modules(empty)} if past[0].training else set())
    return undo(empty, None, weights="original", lint_and_recompile=False)


def names_of(gm: GraphModule) -> tuple[dict[str, int], list[str]]:
    """The name counters and taken names from before a module's history began: new nodes are named after them."""
    counts, taken = fx_private.base_counts(gm.graph), fx_private.used_names(gm.graph)
    for change in reversed(history(gm).changes):
        counts |= {name: count for name, count in change.counts.items() if count is not MISSING}
        counts = {name: count for name, count in counts.items() if change.counts.get(name) is not MISSING}
        taken -= change.names_added
    return counts, sorted(name for name in taken if is_name(name))


def set_names(gm: GraphModule, counts: Mapping[str, int], taken: Iterable[str]) -> None:
    """Let new nodes be named as they were."""
    fx_private.set_base_counts(gm.graph, dict(counts))
    fx_private.reserve_names(gm.graph, taken)


def modes(gm: GraphModule) -> list[str]:
    """The paths of the modules that are in training mode."""
    return [path for path, module in fx_private.walk_modules(gm) if module.training]


def set_modes(gm: GraphModule, training: Iterable[str]) -> None:
    """Put exactly these modules into training mode."""
    wanted = set(training)
    for path, module in fx_private.walk_modules(gm):
        fx_private.set_plain_attribute(module, "training", path in wanted)


def steps_of(gm: GraphModule) -> list[dict[str, Any]]:
    """The history as plain data: for each change the transformation with its settings, and where it fired."""
    steps = []
    for change in history(gm):
        if change.recipe is None:
            raise SaveError(
                f"{change.label} has settings that are not plain data (numbers, texts, lists), so it cannot be "
                f"replayed from a file. Undo it, or call refold.commit(gm) and save the module by other means."
            )
        sites = [list(site.nodes) for site in change.sites]
        groups = [list(group) for group in change.groups]
        step = {"signature": change.signature, "sites": sites, "groups": groups, "prints": change.fingerprints}
        steps.append({**change.recipe, **step})
    return steps


def replay(gm: GraphModule, steps: Iterable[Mapping[str, Any]]) -> None:
    """Apply a recipe's steps in order; each must add one change to the history."""
    for number, step in enumerate(steps):
        transformation = transformation_from(dict(step))
        if transformation.signature != step.get("signature"):
            raise SaveError(f"{transformation!r} is not the transformation that was saved: its settings have changed.")
        sites = [tuple(checked_names(site)) for site in step.get("sites", ())]
        plain = isinstance(transformation, Rewrite) and type(transformation).transform is Rewrite.transform
        runner = Replayed(transformation, sites) if plain else transformation
        if runner(gm, lint_and_recompile=False) is not gm or len(history(gm)) != number + 1:
            raise SaveError(f"{transformation!r} does not do again what it did when the module was saved.")
        _finish(gm, transformation, step)
    gm.graph.lint()
    gm.recompile()


def _finish(gm: GraphModule, transformation: Transformation, step: Mapping[str, Any]) -> None:
    """What the latest change must say, although a stand-in made it."""
    past = history(gm)
    recipe = {"class": step["class"], "settings": step["settings"]}
    groups = tuple((int(signature), int(number)) for signature, number in step.get("groups", ()))
    fingerprints = past[-1].fingerprints  # of the values that this replay made, or of those that were saved
    if "prints" in step:
        fingerprints = {str(name): str(mark) for name, mark in step["prints"].items()}
    latest = replace(
        past[-1], name=type(transformation).__name__, groups=groups, recipe=recipe, fingerprints=fingerprints
    )
    attach(gm, History((*past.changes[:-1], latest), past.initial_order, past.expected))


def is_name(name: Any) -> bool:
    """Whether something can be the name of a node."""
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def checked_names(names: Any) -> list[str]:
    """Names of nodes from a file: they become names in generated code, so they must be identifiers."""
    if not isinstance(names, list):
        raise SaveError("the recipe holds something else where names of nodes should be.")
    for name in names:
        if not is_name(name):
            raise SaveError(f"the recipe names a node {name!r}, which is no identifier: refused.")
    return names
