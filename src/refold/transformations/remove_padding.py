"""RemovePadding: what is computed token by token is computed for the real tokens of a padded batch alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from refold.examples import padded_batches
from refold.graph.view import GraphView
from refold.patterns.packing.grids import find_grids
from refold.patterns.packing.packed_graph import PackedGraph
from refold.patterns.packing.packings import Packing, find_packing
from refold.patterns.packing.token_operators import OPERATORS
from refold.rewrite.editor import Editor
from refold.rewrite.refusal import Refuse, attempt
from refold.rewrite.rule import Example, ReversibleRewrite, Site, Skip


@dataclass(frozen=True, kw_only=True, repr=False)
class RemovePadding(ReversibleRewrite):
    """Leave padding out: embeddings, linear layers, norms and activations see the real tokens of a batch alone.

    `f(x)[b, i]`  for all `b, i`  becomes  `f(x[mask])`  where `f` computes every token by itself; attention between the
    tokens of a row runs row by row, and whatever else needs the batch as it was is given it with zeros at padding.

    Each call looks at its mask. Where packing would not be sound there (a row without a token, padding on another side
    than the model takes, a mask that is no mask), or more than `most` of the places hold real tokens, the same graph
    computes densely. Needs a graph captured with open sizes. It is refused where a real token depends on what stands at
    padding (unmasked means, convolutions along the sequence), which is tried with garbage there. Values that are given
    to the caller at padding, too, are left alone, unless `padding="zeros"` says that nobody reads them: then they are
    zeros there. The same numbers are multiplied in another order: equal up to rounding.
    """

    kind: ClassVar[str] = "graph"
    padding: Literal["exact", "zeros"] = "exact"
    most: float = 0.9

    @property
    def preserves_computation(self) -> bool:  # type: ignore[override]
        """Whether outputs are the same at padding as well."""
        return self.padding == "exact"

    @classmethod
    def examples(cls) -> Iterable[Example]:
        return [padded_batches.classifier(), padded_batches.causal_scores()]

    def find(self, view: GraphView) -> Iterator[Site | Skip]:
        for grid in find_grids(view):
            if any(user.target is OPERATORS.token_plan.default for user in grid.mask.users):
                continue
            packing = attempt(find_packing, grid, self.padding == "zeros")
            if isinstance(packing, Refuse):
                yield Skip(grid.mask, packing.reason)
                continue
            what = f"{len(packing.members)} nodes leave out what {grid.mask.name} calls padding"
            yield Site((grid.mask, *sorted(packing.members, key=view.position.__getitem__)), what, packing)

    def rewrite(self, site: Site, edit: Editor) -> None:
        packing: Packing = site.detail
        PackedGraph(packing, edit, self.most).write()
