"""A packed graph in parts: what looks at the mask of a call, what computes for given tokens, and what computes densely.

A packed graph asks the mask how many tokens are real, and a captured CUDA graph cannot wait for an answer. Here the
mask is looked at by a graph of its own, whose answer has one size for all masks; the tokens are then rounded up to a
multiple, by a sequence of places that do not exist, so that few sizes occur.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from refold.errors import PreparationFailed, UnsupportedInput
from refold.graph.view import GraphView
from refold.patterns.packing.token_operators import CAUSAL, FULL, MASKED, OPERATORS, lies_on_grid, sound_tokens
from refold.record.copies import shared_copy

KEPT, STARTS = "refold_kept", "refold_starts"
"""The arguments that the graph for given tokens takes besides those of the call."""


@dataclass(frozen=True)
class SplitPacking:
    """The parts of a packed graph."""

    plan: nn.Module
    dense: GraphModule
    _packed: GraphModule
    _masks: tuple[Node, ...]

    def for_kinds(self, kinds: tuple[int, ...], step: int) -> GraphModule:
        """The graph for given tokens, where the masks of attention are of these kinds."""
        rest = shared_copy(self._packed)
        nodes = {node.name: node for node in rest.graph.nodes}
        kind_of = {mask.name: kind for mask, kind in zip(self._masks, kinds, strict=True)}
        _compute_given_tokens(rest, nodes, kind_of, step)
        return rest


def split_packing(module: nn.Module, step: int) -> SplitPacking:
    """Take a packed graph apart; refuses what has no padding removed, or removes it by two masks."""
    if not isinstance(module, GraphModule):
        raise PreparationFailed("Padding is removed in captured graphs only.")
    plans = [node for node in module.graph.nodes if node.target is OPERATORS.token_plan.default]
    if len(plans) != 1:
        what = "no padding" if not plans else "the padding of several masks"
        raise PreparationFailed(f"The graph leaves {what} out; this way is for the padding of one mask.")
    view = GraphView(module)
    if view.writers:
        raise PreparationFailed(f"{view.nodes[view.writers[0]].name} writes in place.")
    given = [node.args[3] for node in module.graph.nodes if node.target is OPERATORS.packed_attention.default]
    masks = tuple(dict.fromkeys(mask for mask in given if isinstance(mask, Node)))
    mask, rows, length, side, _most, *reads = plans[0].args
    fetch = _fetching(module, (mask, rows, length, *reads, masks))
    return SplitPacking(CallPlan(fetch, side, step), _computing_densely(module), module, masks)


# --- what looks at the mask ----------------------------------------------------------------------------------------


class CallPlan(nn.Module):
    """For a call: what must be known of it before tokens can be packed, where its tokens stand, where rows begin."""

    def __init__(self, fetch: GraphModule, side: str, step: int) -> None:
        super().__init__()
        self.fetch, self.side, self.step = fetch, side, step

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        """(whether the call can be packed, how many tokens are real, the kind of each mask); the places of the tokens,
        and behind them the place behind the last one; for each row the first of its tokens, and a free entry."""
        mask, rows, length, read_rows, read_positions, masks = nn.Module.__call__(self.fetch, *args, **kwargs)
        if not lies_on_grid(mask, rows, length):
            raise UnsupportedInput("The mask is of another shape than the batch.")
        real, sound = sound_tokens(mask, self.side, read_rows, read_positions)
        kinds = [_kind(mask, real) for mask in masks]
        facts = torch.stack([sound.long(), real.sum(), *kinds])
        places, flat = rows * length, real.flatten()
        behind = flat.cumsum(0) - 1
        kept = torch.full((places + self.step + 1,), places, dtype=torch.int64, device=mask.device)
        kept = kept.scatter(0, torch.where(flat, behind, places + self.step), torch.arange(places, device=mask.device))
        starts = F.pad(real.sum(1).cumsum(0), (1, 1)).to(torch.int32)
        return facts, kept[:-1], starts


def _kind(mask: Tensor, real: Tensor) -> Tensor:
    """Whether a mask, between real tokens, lets all through, is causal, or neither."""
    whole = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    opened = whole if whole.dtype == torch.bool else whole == 0
    closed = ~whole if whole.dtype == torch.bool else whole <= torch.finfo(whole.dtype).min / 2
    pair = real[:, None, :, None] & real[:, None, None, :]
    below = torch.ones(real.shape[1], real.shape[1], dtype=torch.bool, device=real.device).tril()
    full = (opened | ~pair).all()
    causal = (torch.where(below, opened, closed) | ~pair).all()
    return torch.where(full, FULL, torch.where(causal, CAUSAL, MASKED))


def _fetching(module: GraphModule, wanted: Any) -> GraphModule:
    """The part of a graph that gives these values."""
    fetch = shared_copy(module)
    nodes = {node.name: node for node in fetch.graph.nodes}
    output = next(node for node in nodes.values() if node.op == "output")
    output.args = (map_arg(wanted, lambda node: nodes[node.name]),)
    fetch.graph.set_codegen(torch.fx.graph.CodeGen())
    return _finished(fetch)


# --- what computes -------------------------------------------------------------------------------------------------


def _compute_given_tokens(gm: GraphModule, nodes: dict[str, Node], kind_of: dict[Any, int], step: int) -> None:
    plan = next(node for node in nodes.values() if node.target is OPERATORS.token_plan.default)
    _mask, rows, length, *_ = plan.args
    last = [node for node in nodes.values() if node.op == "placeholder"][-1]
    with gm.graph.inserting_after(last):
        kept = gm.graph.placeholder(KEPT, default_value=None)
    with gm.graph.inserting_after(kept):
        starts = gm.graph.placeholder(STARTS, default_value=None)
    for node in nodes.values():
        if node.target is OPERATORS.unpack_tokens.default:
            node.target = unpack_beside
            node.replace_input_with(plan, kept)
        elif node.target is OPERATORS.packed_attention.default:
            query, key, value, mask, _spans, _masks, _rows, _length, is_causal, scale, _gqa = _all_arguments(node)
            causal = is_causal or (mask is not None and kind_of[mask.name] == CAUSAL)
            node.target = attention_in_rows
            node.args, node.kwargs = (query, key, value, starts, length, step, causal, scale), {}
    with gm.graph.inserting_before(plan):
        given = gm.graph.call_function(existing, (kept, rows, length))
    plan.replace_all_uses_with(given)
    _finished(gm)


def _all_arguments(node: Node) -> list[Any]:
    """The arguments of packed attention, those left out too."""
    names = [argument.name for argument in OPERATORS.packed_attention.default._schema.arguments]
    defaults = [argument.default_value for argument in OPERATORS.packed_attention.default._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return [given.get(name, default) for name, default in zip(names, defaults, strict=True)]


def _computing_densely(module: GraphModule) -> GraphModule:
    """The graph as it computes where all places are kept."""
    dense = shared_copy(module)
    for node in list(dense.graph.nodes):
        if node.target is OPERATORS.token_plan.default:
            mask, rows, length, *_ = node.args
            node.target, node.args = every_place, (mask, rows, length)
        elif node.target is OPERATORS.packed_attention.default:
            query, key, value, mask, _spans, _masks, *settings = _all_arguments(node)
            node.target, node.args, node.kwargs = attention_on_grid, (query, key, value, mask, *settings), {}
    return _finished(dense)


def _finished(gm: GraphModule) -> GraphModule:
    """The graph without what nothing reads any more."""
    for node in reversed(list(gm.graph.nodes)):
        if not node.users and node.op not in ("placeholder", "output"):
            gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()
    return gm


def existing(kept: Tensor, rows: int, length: int) -> Tensor:
    """Places to read from: where there is none, the last one is read."""
    return kept.clamp(max=rows * length - 1)


def every_place(mask: Tensor, rows: int, length: int) -> Tensor:
    """All places of the grid."""
    return torch.arange(rows * length, device=mask.device)


def unpack_beside(x: Tensor, kept: Tensor, rows: int, length: int, row: int, position: int) -> Tensor:
    """The grid with tokens at their places; those without a place are written behind it, and left there."""
    if row == position:
        sizes = [rows * length + 1 if dim == row else size for dim, size in enumerate(x.shape)]
        return x.new_zeros(sizes).index_copy(row, kept, x).narrow(row, 0, rows * length)
    tokens = x.movedim((row, position), (0, 1)).select(0, 0)
    grid = tokens.new_zeros((rows * length + 1, *tokens.shape[1:])).index_copy(0, kept, tokens)
    return grid[: rows * length].unflatten(0, (rows, length)).movedim((0, 1), (row, position))


def attention_on_grid(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rows: int, length: int, *settings: Any
) -> Tensor:
    """Attention of (1, heads, places, width) with the mask of the grid."""
    is_causal, scale, enable_gqa = settings
    q, k, v = (_on_grid(t, rows, length) for t in (query, key, value))
    found = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    return found.transpose(1, 2).flatten(0, 1).unsqueeze(0).transpose(1, 2)


def _on_grid(packed: Tensor, rows: int, length: int) -> Tensor:
    return packed.transpose(1, 2).squeeze(0).unflatten(0, (rows, length)).transpose(1, 2)


def attention_in_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    length: int,
    step: int,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Attention of (1, heads, tokens, width), the tokens of each row among themselves, by one kernel for all rows."""
    if not query.is_cuda:
        return _attention_by_mask(query, key, value, starts, is_causal, scale)
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    longest = torch.sym_max(length, step)
    attend: Callable[..., Any] = torch.ops.aten._flash_attention_forward.default
    found = attend(q, k, v, starts, starts, longest, longest, 0.0, is_causal, False, scale=scale)[0]
    return found.transpose(0, 1).unsqueeze(0)


def _attention_by_mask(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, is_causal: bool, scale: float | None
) -> Tensor:
    """The same by a mask over all tokens, on any device."""
    places = torch.arange(query.shape[2], dtype=starts.dtype, device=starts.device)
    row = torch.searchsorted(starts, places, right=True)
    mask = row[:, None] == row
    if is_causal:
        mask = mask & (places[:, None] >= places)
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=grouped)
