"""Attention with grouped heads, spelled out for engines that know only one key and value head a query head."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def spell_out_groups(exported: ExportedProgram) -> ExportedProgram:
    """The same program with key and value heads repeated wherever attention was told to share them."""
    if not any(_is_grouped(node) for node in exported.graph.nodes):
        return exported
    return exported.run_decompositions({_ATTENTION: _attend_with_repeated_heads})


def _is_grouped(node: torch.fx.Node) -> bool:
    return node.target is _ATTENTION and bool(node.kwargs.get("enable_gqa", False))


def _attend_with_repeated_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if not enable_gqa:
        return NotImplemented  # leave the operator as it is
    heads = query.shape[-3]
    key, value = _repeat(key, heads), _repeat(value, heads)
    return _ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)


def _repeat(heads_last: torch.Tensor, heads: int) -> torch.Tensor:
    """(…, groups, length, width) → (…, heads, length, width), each group standing for its neighbours."""
    *front, groups, length, width = heads_last.shape
    wide = heads_last.unsqueeze(-3).expand(*front, groups, heads // groups, length, width)
    return wide.reshape(*front, heads, length, width)
