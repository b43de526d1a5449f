"""Which nodes of a graph may run on packed tokens: those that compute every token of a grid by itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.fx import Node

from refold.graph.groups import connected
from refold.graph.purity import is_pure
from refold.graph.targets import name_of
from refold.graph.values import example_value, is_number
from refold.graph.view import GraphView
from refold.patterns.dimensions.following import Dims, followed_dims
from refold.patterns.dimensions.sized_calls import recorded_sizes, regrouped, surely_equal
from refold.patterns.packing.grids import Grid, Place, is_product
from refold.patterns.packing.windows import WHOLE, Window, cut
from refold.rewrite.operators import Attention, match_attention
from refold.rewrite.refusal import Refuse, attempt

_RESHAPES = {"view", "reshape", "_unsafe_view", "flatten", "unflatten"}


def find_token_wise(grid: Grid) -> tuple[set[Node], dict[Node, Attention]]:
    """The nodes that may be packed, and among them the calls of attention between the tokens of a row."""
    view = grid.view
    found: set[Node] = set()
    attentions: dict[Node, Attention] = {}
    informed: set[Node] = set()
    for node in view.nodes:
        if node.op == "placeholder":
            informed |= {node} - {grid.mask}
            continue
        if informed.isdisjoint(node.all_input_nodes):
            continue
        informed.add(node)
        if not _is_real(node) or node in view.written or _depends_on_data(node):
            continue
        window = _window(grid, node, found)
        attention = _attention(grid, node) if window == WHOLE else None
        if attention is not None:
            attentions[node] = attention
        if attention is not None or (window is not None and _is_token_wise(grid, node, window)):
            found.add(node)
            grid.windows[node] = window or WHOLE
    return found, attentions


def _window(grid: Grid, node: Node, found: Collection[Node]) -> Window | None:
    """Which positions of the grid a value has if it is computed token by token; None where values that begin or end at
    different positions meet."""
    given = {
        grid.window(n) for n in node.all_input_nodes if n in found and (grid.place(n) or (None, None))[1] is not None
    }
    if len(given) > 1:
        return None
    window = given.pop() if given else WHOLE
    return cut(node, _positions(grid, node), window) or window


def _positions(grid: Grid, node: Node) -> int | None:
    """The dimension along which the positions lie in the first operand, if they have one of their own."""
    operand = node.args[0] if node.args else None
    row, position = (grid.place(operand) if isinstance(operand, Node) else None) or (None, None)
    return position if row != position else None


def worth_packing(view: GraphView, members: set[Node]) -> set[Node]:
    """The members without the groups in which nothing is multiplied: masks, positions, norms by themselves."""
    ordered = sorted(members, key=view.position.__getitem__)
    links: list[Iterable[str]] = [[n.name, *(i.name for i in n.all_input_nodes if i in members)] for n in ordered]
    products = {n.name for n in ordered if is_product(view, n)}
    worth: set[str] = set().union(*(group for group in connected(links) if group & products))
    return {n for n in members if n.name in worth}


def _is_real(node: Node) -> bool:
    """Whether a value is one tensor, or several, of real numbers."""
    value = node.meta.get("val")
    many = value if isinstance(value, tuple | list) else [value]
    return bool(many) and all(isinstance(v, torch.Tensor) and v.is_floating_point() for v in many)


def _depends_on_data(node: Node) -> bool:
    """Whether a size of a value is known in a run only."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # symbolic algebra takes long to load

    return bool(free_unbacked_symbols(recorded_sizes(node) or ()))


def _is_token_wise(grid: Grid, node: Node, window: Window) -> bool:
    place = grid.place(node, window)
    if place is None or None in place or not (is_pure(grid.view.gm, node) or _only_drops(grid.view, node)):
        return False
    if window != WHOLE and place[0] == place[1]:
        return False
    if cut(node, _positions(grid, node), WHOLE) is not None:
        return grid.place(node.args[0]) == place  # type: ignore[arg-type]
    if node.op in ("call_function", "call_method") and name_of(node) in _RESHAPES and regroups(grid, node):
        return True
    followed = followed_dims(grid.view, node)
    if not followed:
        return False
    places = {n: grid.place(n, window) for n in followed}
    if not all(_agrees(places[n], place, dims) for n, dims in followed.items()):
        return False
    by_row = [n for n, own in places.items() if own is not None and own[0] is not None and own[1] is None]
    return all(_is_broadcast(grid, n, place, followed[n]) for n in by_row)


def _only_drops(view: GraphView, node: Node) -> bool:
    """Whether a node sets values to zero at random, each by itself."""
    if node.op == "call_module":
        return type(view.module(str(node.target))) is torch.nn.Dropout
    return name_of(node) == "dropout"


def _agrees(given: Place | None, place: Place, dims: Dims) -> bool:
    """Whether a value follows the rows and positions of an input where that has them, and repeats it where not."""
    if given is None or ((given[0] == given[1]) is not (place[0] == place[1]) and given != (None, None)):
        return False
    for own, theirs in zip(place, given, strict=True):
        follows = [d for d, k in enumerate(dims) if k == theirs and isinstance(k, int)]
        if (theirs is None and dims[own] is not None) or (theirs is not None and follows != [own]):  # type: ignore[index]
            return False
    return True


def _is_broadcast(grid: Grid, given: Node, place: Place, dims: Dims) -> bool:
    """Whether an operand that has rows alone has one position, in the place of the result's positions."""
    sizes = recorded_sizes(given) or ()
    new = len(dims) - len(sizes)
    position = (place[1] or 0) - new
    aligned = all(k is None or k == d - new for d, k in enumerate(dims))
    return aligned and position >= 0 and bool(surely_equal(sizes[position], 1))


def regroups(grid: Grid, node: Node) -> bool:
    """Whether a reshape joins rows and positions to one dimension, or parts them, and leaves others to themselves."""
    source: Any = node.args[0]
    old, new = recorded_sizes(source), recorded_sizes(node)
    before, after = grid.place(source), grid.place(node)
    if old is None or new is None or before is None or after is None or None in (*before, *after):
        return False
    if (before[0] == before[1]) is (after[0] == after[1]) or before[0] + 1 < before[1] or after[0] + 1 < after[1]:  # type: ignore[operator]
        return False
    for mine, theirs in regrouped(old, new):
        mine = [d for d in mine if not surely_equal(old[d], 1)]
        theirs = [d for d in theirs if not surely_equal(new[d], 1)]
        if set(mine) == set(before) and set(theirs) == set(after):
            return True
    return False


def _attention(grid: Grid, node: Node) -> Attention | None:
    """Attention of (rows, heads, positions, width) with a mask that is made from none of the tokens."""
    found = attempt(match_attention, node)
    if found is None or isinstance(found, Refuse) or found.dropout_p != 0.0:
        return None
    operands = (found.query, found.key, found.value)
    if any(grid.place(n) != (0, 2) or len(recorded_sizes(n) or ()) != 4 for n in operands):
        return None
    if not isinstance(found.is_causal, bool) or not isinstance(found.enable_gqa, bool):
        return None
    if not isinstance(found.scale, float | None):
        return None
    mask = found.attn_mask
    if isinstance(mask, Node) and (example_value(mask) is None or not _broadcasts(grid, mask)):
        return None
    return found


def _broadcasts(grid: Grid, mask: Node) -> bool:
    """Whether a mask says something of each query and key of the grid, or one thing of all."""
    sizes: Any = recorded_sizes(mask)
    if sizes is None or not 2 <= len(sizes) <= 4:
        return False
    rows = len(sizes) < 4 or grid.label(sizes[0]) == "rows" or surely_equal(sizes[0], 1)
    return rows and all(grid.label(size) == "length" or surely_equal(size, 1) for size in sizes[-2:])


def reads_tokens(user: Node) -> bool:
    """Whether a node reads the numbers of a value: not its sizes, dtype or device alone."""
    if is_number(user) or (user.op == "call_function" and user.target is getattr):
        return False
    return not (name_of(user) == "_assert_tensor_metadata" and len(user.args) == 1 and "size" not in user.kwargs)


def made_from(view: GraphView, members: Collection[Node]) -> set[Node]:
    """All that is made from the numbers of some values, without those values."""
    found: set[Node] = set()
    for node in view.nodes:
        read = any(n in found or n in members for n in node.all_input_nodes)
        if read and node not in members and reads_tokens(node):
            found.add(node)
    return found


def places_read(grid: Grid, node: Node) -> tuple[Node, Node] | None:
    """The rows and positions at which a node reads a value of the grid, where they are given as two lists."""
    if node.op != "call_function" or name_of(node) not in ("index", "getitem") or len(node.args) != 2:
        return None
    given, places = node.args
    if not isinstance(given, Node) or grid.place(given) != (0, 1) or not isinstance(places, list | tuple):
        return None
    chosen = [n for n in places if isinstance(n, Node) and example_value(n) is not None]
    return (chosen[0], chosen[1]) if len(places) == len(chosen) == 2 else None


def ancestors(nodes: Collection[Node], members: set[Node]) -> set[Node]:
    """Some members, and all members that they are made from through members."""
    found: set[Node] = set()
    pending = [n for n in nodes if n in members]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [n for n in node.all_input_nodes if n in members]
    return found
