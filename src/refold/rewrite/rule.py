"""The frame most transformations share: first find all sites without touching anything, then rewrite them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.fx import GraphModule, Node

from refold import fx_private
from refold.errors import BrokenTransformation
from refold.examples import Example
from refold.graph.view import GraphView
from refold.record import call_notes
from refold.record.outcome import Refused, Result, Rewritten
from refold.rewrite.editor import Editor
from refold.rewrite.refusal import Refuse
from refold.rewrite.transformation import ReversibleTransformation, Transformation

_ROUNDS = 1000


@dataclass(frozen=True)
class Site:
    """A place that can be rewritten: its nodes, a sentence about it, and what the rewrite needs to know."""

    nodes: tuple[Node, ...]
    what: str
    detail: Any = None
    needs: tuple[Node, ...] = ()
    """Other nodes that must not be part of a place that is rewritten in the same round."""


@dataclass(frozen=True)
class Skip:
    """A place that looks alike and is left alone, with the reason as a sentence."""

    node: Node
    reason: str


class Rewrite(Transformation):
    """A transformation made of independent sites. Subclasses write `match` (or `find`), which only look, `rewrite`,
    and `examples`: every concrete rewrite is made without arguments and run through all laws of `refold.testing` on its
    own examples.
    """

    preserves_computation = True
    kind: ClassVar[str] = "structural"
    """structural (the weights come back by slicing), parametric (by an inverse) or graph (no weights)."""

    def match(self, view: GraphView, node: Node) -> Site | None:
        """The site at a node; None where the node is something else. `Refuse` is raised where it almost fits."""
        raise NotImplementedError(f"{type(self).__name__} has to write match(view, node), or find(view).")

    def find(self, view: GraphView) -> Iterable[Site | Skip]:
        """Sites to rewrite and places to leave alone, by default those that `match` finds, node by node. After all are
        rewritten, it is called again, until there are none; a site that has nodes of an earlier one waits till then."""
        for node in view.nodes:
            try:
                site = self.match(view, node)
            except Refuse as refusal:
                yield Skip(node, refusal.reason)
                continue
            if site is not None:
                yield site

    @abstractmethod
    def rewrite(self, site: Site, edit: Editor) -> None:
        """Rewrite one site."""

    @classmethod
    def examples(cls) -> Iterable[Example]:
        """(model, inputs) pairs on which this rewrite fires: tiny, in float32, made anew at every call, the model in
        the mode (train or eval) in which it is to be rewritten. They become the rule's tests and its page in the
        documentation; a rewrite without any fails the law suite. Models that several rules share stand in
        `refold.examples`."""
        return ()

    def transform(self, graph_module: GraphModule) -> GraphModule:
        notes = call_notes.current()
        for skip in _rewrite_in_rounds(self, graph_module):
            if not self.transformed(skip.node):  # what it made itself is no news
                notes.skip(skip.node, skip.reason)
        return graph_module

    def explain(self, graph_module: GraphModule) -> Result:
        """What would be rewritten and why the rest would not; nothing is touched."""
        sites, skips = _sites_and_skips(self, graph_module)
        rewritten = tuple(Rewritten(tuple(n.name for n in site.nodes), site.what) for site in sites)
        refused = tuple(Refused(skip.node.name, skip.reason) for skip in skips)
        return Result(repr(self), rewritten, refused, "" if sites or skips else "Nothing in the graph matched.")


def _rewrite_in_rounds(rule: Rewrite, gm: GraphModule) -> list[Skip]:
    """Rewrite all sites, round after round until there are none; the places that are left alone in the end."""
    for _ in range(_ROUNDS):
        sites, skips = _sites_and_skips(rule, gm)
        if not sites:
            return skips
        edit = Editor(gm, rule.mark_as_transformed)
        for site in sites:
            _check_still_there(rule, site)
            call_notes.current().rewrote(site.nodes, site.what)
            rule.rewrite(site, edit)
    raise BrokenTransformation(
        f"{rule!r} still finds a place to rewrite after {_ROUNDS} rounds ({sites[0].what!r}): what is rewritten must "
        f"not be found again."
    )


def _sites_and_skips(rule: Rewrite, gm: GraphModule) -> tuple[list[Site], list[Skip]]:
    """What a rule finds; sites that overlap with earlier ones are left for the next round."""
    sites: list[Site] = []
    skips: list[Skip] = []
    taken: set[Node] = set()
    found = rule.find(GraphView(gm))
    for item in (None,) if found is None else found:
        if isinstance(item, Skip):
            skips.append(item)
        elif not isinstance(item, Site):
            raise BrokenTransformation(f"the find of {rule!r} gave {item!r}, and must give only Site and Skip.")
        elif taken.isdisjoint((*item.nodes, *item.needs)):
            taken.update(item.nodes)
            sites.append(item)
    return sites, skips


def _check_still_there(rule: Rewrite, site: Site) -> None:
    gone = [node.name for node in site.nodes if fx_private.is_erased(node)]
    if gone:
        raise BrokenTransformation(
            f"{rule!r} erased {', '.join(gone)} of {site.what!r} when it rewrote another place: a site must name all "
            f"nodes that its rewrite erases."
        )


class ReversibleRewrite(Rewrite, ReversibleTransformation):
    """A rewrite that can be asked to reverse itself."""
