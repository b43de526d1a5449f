"""The frame most transformations share: first find all sites without touching anything, then rewrite them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from torch.fx import GraphModule, Node

from refold import fx_private, recording
from refold.edit import Editor
from refold.errors import BrokenTransformation
from refold.match import GraphView
from refold.result import Refused, Result, Rewritten
from refold.transformation import ReversibleTransformation, Transformation

_ROUNDS = 1000

Example = tuple[nn.Module, tuple[Any, ...]]
"""A small model (or a GraphModule that is captured already) that a rewrite fires on, and inputs for it."""


@dataclass(frozen=True)
class Site:
    """A place that can be rewritten: its nodes, a sentence about it, and what the rewrite needs to know."""

    nodes: tuple[Node, ...]
    what: str
    detail: Any = None


@dataclass(frozen=True)
class Skip:
    """A place that looks alike and is left alone, with the reason as a sentence."""

    node: Node
    reason: str


class Rewrite(Transformation):
    """A transformation made of independent sites. Subclasses write `find`, which only looks, `rewrite`, and `examples`:
    every concrete rewrite is made without arguments and run through all laws of `refold.testing` on its own examples.
    """

    preserves_computation = True
    kind: ClassVar[str] = "structural"
    """structural (the weights come back by slicing), parametric (by an inverse) or graph (no weights)."""

    @abstractmethod
    def find(self, view: GraphView) -> Iterable[Site | Skip]:
        """Sites to rewrite and places to leave alone; sites must not overlap."""

    @abstractmethod
    def rewrite(self, site: Site, edit: Editor) -> None:
        """Rewrite one site."""

    @classmethod
    def examples(cls) -> Iterable[Example]:
        """(model, inputs) pairs on which this rewrite fires: tiny, in float32, made anew at every call, the model in
        the mode (train or eval) in which it is to be rewritten. They become the rule's tests and its page in the
        documentation; a rewrite without any fails the law suite. Models that several rules share stand in
        `refold.testing.models`; import them inside this method."""
        return ()

    def transform(self, graph_module: GraphModule) -> GraphModule:
        notes = recording.current()
        for _ in range(_ROUNDS):
            sites, skips = _sites_and_skips(self, graph_module)
            edit = Editor(graph_module)
            for site in sites:
                _check_still_there(self, site)
                notes.rewrote(site.nodes, site.what)
                self.rewrite(site, edit)
            if not sites:
                break
        else:
            raise BrokenTransformation(
                f"{self!r} still finds a place to rewrite after {_ROUNDS} rounds ({sites[0].what!r}): what is "
                f"rewritten must not be found again."
            )
        for skip in skips:
            if not self.transformed(skip.node):  # what it made itself is no news
                notes.skip(skip.node, skip.reason)
        return graph_module

    def explain(self, graph_module: GraphModule) -> Result:
        """What would be rewritten and why the rest would not; nothing is touched."""
        sites, skips = _sites_and_skips(self, graph_module)
        rewritten = tuple(Rewritten(tuple(n.name for n in site.nodes), site.what) for site in sites)
        refused = tuple(Refused(skip.node.name, skip.reason) for skip in skips)
        return Result(repr(self), rewritten, refused, "" if sites or skips else "Nothing in the graph matched.")


def _sites_and_skips(rewrite: Rewrite, graph_module: GraphModule) -> tuple[list[Site], list[Skip]]:
    sites: list[Site] = []
    skips: list[Skip] = []
    found = rewrite.find(GraphView(graph_module))
    for item in (None,) if found is None else found:
        if isinstance(item, Site):
            sites.append(item)
        elif isinstance(item, Skip):
            skips.append(item)
        else:
            raise BrokenTransformation(f"the find of {rewrite!r} gave {item!r}, and must give only Site and Skip.")
    return sites, skips


def _check_still_there(rewrite: Rewrite, site: Site) -> None:
    gone = [node.name for node in site.nodes if fx_private.is_erased(node)]
    if gone:
        raise BrokenTransformation(
            f"the find of {rewrite!r} gave two sites that overlap: {site.what!r} has {', '.join(gone)}, which is gone "
            f"since another one was rewritten."
        )


class ReversibleRewrite(Rewrite, ReversibleTransformation):
    """A rewrite that can be asked to reverse itself."""


def registered() -> Iterator[type[Rewrite]]:
    """Every concrete rewrite class that is defined, for laws, listings and saved recipes."""
    pending: list[type[Rewrite]] = [Rewrite]  # type: ignore[type-abstract]
    seen: set[type[Rewrite]] = set()
    while pending:
        for cls in pending.pop().__subclasses__():
            if cls not in seen:
                seen.add(cls)
                pending.append(cls)
                if not getattr(cls, "__abstractmethods__", None):
                    yield cls
