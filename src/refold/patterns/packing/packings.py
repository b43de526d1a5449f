"""What of a graph can be packed soundly, and for which padding: found by trying, and by leaving out what reads it."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from refold.graph.layout import hands_out
from refold.graph.purity import drops_at_random
from refold.graph.values import example_value, is_number
from refold.graph.view import GraphView
from refold.patterns.packing.grids import Grid, is_product
from refold.patterns.packing.padding_trials import PaddingTrial
from refold.patterns.packing.token_wise import ancestors, find_token_wise, made_from, worth_packing
from refold.patterns.packing.windows import WHOLE
from refold.rewrite.operators import Attention
from refold.rewrite.refusal import Refuse

AT_PADDING = "at padding as well; RemovePadding(padding='zeros') says that it is not read there"
"""How a refusal ends that the caller can take away."""


@dataclass(frozen=True)
class Packing:
    """A packing that is proven: the nodes that run on packed tokens, the attention among them, and the side on which
    padding must stand ('any', 'right' or 'left')."""

    grid: Grid
    members: frozenset[Node]
    attentions: dict[Node, Attention]
    side: str
    reads: tuple[tuple[Node, Node], ...]
    """Rows and positions that are read of themselves, and must be real ones."""


def find_packing(grid: Grid, zeros: bool) -> Packing:
    """What can be packed on a grid; refuses where nothing can, or where an output is read at padding."""
    view = grid.view
    if grid.mask in view.written:
        raise Refuse(f"{view.written[grid.mask].name} writes into the mask")
    members, attentions = find_token_wise(grid)
    wanted = members = _settled(view, members, attentions)
    if not members:
        raise Refuse("nothing that is multiplied is computed token by token, as far as can be told")
    side = ""
    while not side:
        _check_outputs(grid, members, zeros)
        trial = PaddingTrial(grid, members, {n: a for n, a in attentions.items() if n in members})
        side, readers = _side(trial)
        if not side:
            first = min(readers, key=view.position.__getitem__)
            members = _without(grid, members, attentions, readers)
            if not members or _products(view, members) < _products(view, wanted) / 2:
                refuse_dropout(view)
                raise Refuse(f"what stands at padding in {first.name} changes what is computed at real tokens")
    return Packing(grid, frozenset(members), trial.attentions, side, tuple(dict.fromkeys(trial.reads.values())))


def refuse_dropout(view: GraphView) -> None:
    """Refuse a graph that drops values at random: nothing that it computes can be compared."""
    dropping = next((n for n in view.nodes if drops_at_random(view.gm, n)), None)
    if dropping is not None:
        raise Refuse(
            f"{dropping.name} drops values at random, so nothing can be compared: set the model's dropout to 0"
        )


def _side(trial: PaddingTrial) -> tuple[str, set[Node]]:
    """On which side padding may stand; '' if on none, with the values that are read at padding on the right."""
    readers = trial.readers_of_padding("right")
    if not readers:
        return ("right" if trial.reads_padding("any") else "any"), readers
    return ("" if trial.reads_padding("left") else "left"), readers


def _without(grid: Grid, members: set[Node], attentions: dict[Node, Attention], readers: set[Node]) -> set[Node]:
    """The members but those whose padding is read. Where one was masked before, it may be masked on the grid instead;
    else all that it is made from goes too, and attention that reads it."""
    masked = set().union(*(_masked_before(grid, members, node) for node in readers))
    if masked:
        return _settled(grid.view, members - masked, attentions)
    blind = {n for n in attentions if not readers.isdisjoint(n.all_input_nodes)}
    return _settled(grid.view, members - ancestors(readers, members) - blind, attentions)


def _masked_before(grid: Grid, members: set[Node], node: Node) -> set[Node]:
    """A value and what it is made from, back to where a mask entered; nothing where none did before the last layer."""
    if node not in members or is_product(grid.view, node):
        return set()
    masks = made_from(grid.view, (grid.mask,)) - members
    found = set().union(*(_masked_before(grid, members, n) for n in node.all_input_nodes))
    return found | {node} if found or not masks.isdisjoint(node.all_input_nodes) else set()


def _settled(view: GraphView, members: set[Node], attentions: dict[Node, Attention]) -> set[Node]:
    """The members but attention whose mask is made from packed tokens, lists that are read as lists, and groups that
    are not worth it."""
    while True:
        reached = made_from(view, members) | members
        wrong = {n for n in members if n in attentions and attentions[n].attn_mask in reached}
        wrong |= {n for n in members if example_value(n) is None and not set(n.users) <= members}
        left = worth_packing(view, members - wrong)
        if left == members:
            return members
        members = left


def _products(view: GraphView, members: set[Node]) -> int:
    return sum(is_product(view, node) for node in members)


def handed_out(view: GraphView, node: Node) -> bool:
    """Whether a value is given to the caller, or put into an object that is."""
    return any(hands_out(user) for user in node.users)


def _check_outputs(grid: Grid, members: set[Node], zeros: bool) -> None:
    given = [n for n in members if handed_out(grid.view, n) and not is_number(n)]
    for node in sorted(given, key=grid.view.position.__getitem__):
        if not zeros:
            raise Refuse(f"the caller is given {node.name} {AT_PADDING}")
        mask = example_value(grid.mask)
        if grid.place(node) != (0, 1) or grid.window(node) != WHOLE or mask is None or mask.dim() != 2:
            raise Refuse(f"the caller is given {node.name}, which is no value for each token (a cache, perhaps)")
