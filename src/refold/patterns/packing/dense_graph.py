"""A packed graph without its packing: what engines that know none of its operators are given."""

from __future__ import annotations

from torch.fx import GraphModule

from refold.patterns.packing.token_operators import OPERATORS
from refold.record.change import Change
from refold.record.copies import shared_copy
from refold.record.reversal import undo_chosen
from refold.record.stack import history


def leaves_padding_out(gm: GraphModule) -> bool:
    """Whether a graph looks at the mask of each call, and computes real tokens alone."""
    return any(node.target is OPERATORS.token_plan.default for node in gm.graph.nodes)


def with_padding(gm: GraphModule) -> GraphModule:
    """The graph over the same weights that computes padding, too; itself where it does so already."""
    if not leaves_padding_out(gm):
        return gm
    chosen = [index for index, change in enumerate(history(gm)) if _packs(change)]
    return undo_chosen(shared_copy(gm), chosen[::-1])


def _packs(change: Change) -> bool:
    return any(record.target is OPERATORS.token_plan.default for record in change.created.values())
