"""Writes a packed graph: token-wise nodes at the sizes (1, tokens), packed once before them and unpacked behind."""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from refold.graph.layout import VIEWS, hands_out, make_reshape
from refold.graph.values import is_number
from refold.patterns.dimensions.sized_calls import recorded_sizes
from refold.patterns.packing.packings import Packing
from refold.patterns.packing.token_operators import OPERATORS
from refold.patterns.packing.token_wise import reads_tokens
from refold.patterns.packing.windows import WHOLE, Window, cut
from refold.rewrite.editor import Editor, make_views_reshapes
from refold.rewrite.operators import Attention
from refold.rewrite.recorded_values import PLACE, RecordedValues

aten = torch.ops.aten
_SHAPES = {"view", "reshape", "_unsafe_view", "expand"}


class PackedGraph:
    """Writes one packing into its graph."""

    def __init__(self, packing: Packing, edit: Editor, most: float) -> None:
        self.packing, self.grid, self.edit = packing, packing.grid, edit
        self.values = RecordedValues(edit.gm)
        view = self.grid.view
        self.places = {n: self.grid.place(n) for n in view.nodes}
        self.sizes = {n: recorded_sizes(n) for n in packing.members}
        needed = view.needed_for_all(n for pair in packing.reads for n in pair)
        first = [n for n in needed if n.op != "placeholder"]
        last = [n for n in view.nodes if n.op == "placeholder"][-1]
        start = next(n for n in view.nodes[view.position[last] + 1 :] if n not in first)
        self.rows = edit.call(start, aten.sym_size.int, self.grid.source, 0)
        self.length = edit.call(start, aten.sym_size.int, self.grid.source, 1)
        for node in first:
            start.prepend(node)
        settings = (packing.side, most, *map(list, zip(*packing.reads, strict=True) if packing.reads else ((), ())))
        self.kept = edit.call(start, OPERATORS.token_plan.default, self.grid.mask, self.rows, self.length, *settings)
        self.tokens = edit.call(start, aten.sym_size.int, self.kept, 0)
        self.made: dict[object, Node] = {}
        for node in (self.rows, self.length, self.kept, self.tokens):
            self._place(node)

    def write(self) -> None:
        """Let the members run on packed tokens, and all others on the grid as before."""
        members = [n for n in self.grid.view.nodes if n in self.packing.members]
        outside = {n: [u for u in n.users if u not in self.packing.members] for n in members}
        for node in members:
            attention = self.packing.attentions.get(node)
            if attention is not None:
                self._pack_attention(attention)
            else:
                self._pack_call(node)
            node.meta.pop("val", None)
            self.values.record(node)
            self.edit.mark(node)
        for node, users in outside.items():
            self._unpack(node, users)

    def _place(self, node: Node) -> None:
        """What is made for all members stems from the first: inputs stem from no place of the model."""
        _stems_from(next(n for n in self.grid.view.nodes if n in self.packing.members), node)

    # --- members -----------------------------------------------------------------------------------------------------

    def _pack_call(self, node: Node) -> None:
        if self._cuts(node):  # tokens that are not read any more are computed on: few, and each by itself
            node.target, node.args = aten.alias.default, (self._operand(node, node.all_input_nodes[0]),)
            return
        if node.target in VIEWS:
            make_reshape(node)
        args: Any = node.args
        if _name(node) in _SHAPES and len(args) == 2 and isinstance(args[1], list | tuple):
            args = (args[0], self._shape(node, args[1]))
        elif _name(node) in _SHAPES and len(args) > 2:
            args = (args[0], *self._shape(node, args[1:]))
        node.args = map_arg(args, lambda n: self._operand(node, n))
        node.kwargs = map_arg(node.kwargs, lambda n: self._operand(node, n))

    def _cuts(self, node: Node) -> bool:
        """Whether a member cuts positions off."""
        given = node.all_input_nodes[:1]
        return bool(given) and cut(node, (self.places[given[0]] or (None, None))[1], WHOLE) is not None

    def _shape(self, node: Node, given: Any) -> list[Any]:
        """The sizes that a reshape is given, with those of the packed tokens in the place of the grid's."""
        row, position = self.places[node] or (None, None)
        found: list[Any] = []
        for dim, size in enumerate(given):
            fixed = (self.sizes[node] or ())[dim]
            if dim == position:
                found.append(self.tokens)
            elif dim == row:
                found.append(1)
            else:
                found.append(fixed if size == -1 and isinstance(fixed, int) else size)
        return found

    def _operand(self, node: Node, given: Node) -> Any:
        if given in self.packing.members or given in self.made.values():
            return given
        window = WHOLE if self._cuts(node) else self.grid.window(node)
        if is_number(given):
            return self._number(given, window)
        row, position = self.grid.place(given, window) or (None, None)
        if row is None and position is None:
            return given
        key = (given, row, position, window)
        if key not in self.made:
            whole = given if position is None else self._with_all_positions(node, given, position, window)
            self.made[key] = self._packed(node, whole, row, position)
        return self.made[key]

    def _with_all_positions(self, node: Node, given: Node, position: int, window: Window) -> Node:
        """A value that lacks some positions, with zeros there: nothing reads what is computed from them."""
        if window == WHOLE:
            return given
        behind = len(recorded_sizes(given) or ()) - 1 - position
        return self.edit.call(
            node, aten.constant_pad_nd.default, given, [0, 0] * behind + [window.front, window.behind]
        )

    def _packed(self, node: Node, given: Node, row: int | None, position: int | None) -> Node:
        if row is not None and position is not None:
            return self.edit.call(node, OPERATORS.pack_tokens.default, given, self.kept, row, position)
        if position is not None:
            return self.edit.call(node, aten.index_select.default, given, position, self._index("positions"))
        assert row is not None
        chosen = self.edit.call(node, aten.index_select.default, given, row, self._index("rows"))
        along = (self.places[node] or (0, 0))[1] or 0
        along -= len(self.sizes[node] or ()) - len(recorded_sizes(given) or ())
        return self.edit.call(node, aten.transpose.int, chosen, row, along)

    def _index(self, which: str) -> Node:
        """The row, or the position in its row, of each packed token."""
        if which not in self.made:
            behind = self.tokens.next
            if which == "positions":
                self.made[which] = self.edit.call(behind, aten.remainder.Scalar, self.kept, self.length)
            else:
                self.made[which] = self.edit.call(
                    behind, aten.div.Scalar_mode, self.kept, self.length, rounding_mode="floor"
                )
            self._place(self.made[which])
        return self.made[which]

    def _number(self, number: Node, window: Window) -> Any:
        """A size of packed tokens in the place of one of the grid."""
        label = self.grid.label(number.meta.get("val"), window.missing)
        return {"rows": 1, "length": self.tokens, "places": self.tokens}.get(label, number)

    def _pack_attention(self, call: Attention) -> None:
        node, mask = call.node, call.attn_mask
        operands = [self._operand(node, n) for n in (call.query, call.key, call.value)]
        if ("plan", mask) not in self.made:
            plan = self.edit.call(node, OPERATORS.attention_plan.default, mask, self.kept, self.rows, self.length)
            self.made["plan", mask] = self.edit.call(node, operator.getitem, plan, 0)
            self.made["masks", mask] = self.edit.call(node, operator.getitem, plan, 1)
        spans, masks = self.made["plan", mask], self.made["masks", mask]
        node.op, node.target, node.kwargs = "call_function", OPERATORS.packed_attention.default, {}
        sizes = (self.rows, self.length, call.is_causal, call.scale, call.enable_gqa)
        node.args = (*operands, mask, spans, masks, *sizes)

    # --- behind them -------------------------------------------------------------------------------------------------

    def _unpack(self, node: Node, users: list[Node]) -> None:
        row, position = self.places[node] or (None, None)
        grid: Node | None = None
        for user in users:
            if is_number(user):
                self._count_grid(user, self.grid.window(node))
                continue
            if not reads_tokens(user):
                continue
            if grid is None:
                sizes = (self.rows, self.length, row, position)
                grid = self.edit.call(node.next, OPERATORS.unpack_tokens.default, node, self.kept, *sizes)
                _stems_from(node, grid)
                grid = self._in_window(node, grid, position)
            if hands_out(user):
                zeros = self.edit.call(user, OPERATORS.zero_padding.default, grid, self.grid.mask, row, position)
                user.replace_input_with(node, zeros)
            else:
                user.replace_input_with(node, grid)
        if grid is not None:
            make_views_reshapes(self.edit.gm, grid)

    def _in_window(self, node: Node, grid: Node, position: int | None) -> Node:
        """The positions of the grid that a value had."""
        window = self.grid.window(node)
        if window == WHOLE:
            return grid
        end = -window.behind if window.behind else sys.maxsize
        part = self.edit.call(grid.next, aten.slice.Tensor, grid, position, window.front, end)
        _stems_from(node, part)
        return part

    def _count_grid(self, user: Node, window: Window) -> None:
        """A size of a value that is packed now is asked of the input that has the grid's sizes."""
        counted = {"rows": self.rows, "length": self.length}.get(self.grid.label(user.meta.get("val"), window.missing))
        if counted is self.length and window != WHOLE:
            counted = self.edit.call(user, operator.sub, self.length, window.missing)
        if counted is not None:
            user.replace_all_uses_with(counted, propagate_meta=False)


def _stems_from(source: Node, made: Node) -> None:
    made.meta |= {key: source.meta[key] for key in PLACE if key in source.meta}


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "").split(".")[0]
