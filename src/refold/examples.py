"""Small models that the newer rewrites fire on: their examples in the laws and the documentation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from refold.testing.models import Example, exported, seeded


class MaskedAttention(nn.Module):
    """Self-attention over one head with a mask made from positions."""

    def __init__(self, kind: str, size: int = 4) -> None:
        super().__init__()
        self.mix = nn.Linear(size, 3 * size)
        self.kind = kind

    def mask(self, length: int, x: torch.Tensor) -> torch.Tensor:
        """The mask for a length."""
        places = torch.arange(length, device=x.device)
        if self.kind == "all":
            return (places >= 0)[None, :].expand(length, length)
        seen = places[None, :] <= places[:, None]
        if self.kind == "causal":
            return seen & torch.ones((), dtype=torch.bool, device=x.device)
        return torch.zeros((), dtype=x.dtype, device=x.device).masked_fill(~seen, -torch.inf)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(x).chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask(x.shape[1], x))


def _attention(kind: str) -> Example:
    return exported(seeded(lambda: (MaskedAttention(kind), (torch.randn(2, 3, 4),))))


def causal_attention() -> Example:
    """Attention with a causal mask of truth values."""
    return _attention("causal")


def all_seeing_attention() -> Example:
    """Attention with a mask that masks nothing."""
    return _attention("all")


def additive_causal_attention() -> Example:
    """Attention with a causal mask of 0 and −∞ that is added."""
    return _attention("additive")
