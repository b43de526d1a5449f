"""Attention, masks and positions, as small models that rewrites fire on.

(Annotations are real classes here, not strings: torch cannot unpickle the graph of a model whose annotations are.)
"""

import torch
import torch.nn.functional as F
from torch import nn

from refold.examples import example_factory


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


class Positions(nn.Module):
    """Sinusoidal positions for one fixed length, computed anew in every run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(3)[:, None] / torch.full((2,), 10.0) ** torch.tensor([0.5, 1.0])
        return x * torch.cat([angles.sin(), angles.cos()], -1)


class Rotary(nn.Module):
    """Frequencies kept outside the checkpoint, turned into a table in every run."""

    frequencies: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1.0 / torch.arange(1.0, 5.0), persistent=False)
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.outer(torch.arange(3).to(self.frequencies), self.frequencies).cos()
        return x * table * self.weight.exp() + table


class DecomposedAttention(nn.Module):
    """Attention over two heads, in single steps, with or without a learned bias."""

    def __init__(self, biased: bool = False) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 12)
        self.drop = nn.Dropout(0.1)
        self.bias = nn.Parameter(torch.randn(1, 2, 3, 3)) if biased else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(x).view(2, 3, 3, 2, 2).permute(2, 0, 3, 1, 4).unbind()
        scores = query @ key.transpose(-1, -2) / 1.5
        weights = (scores if self.bias is None else scores + self.bias).softmax(-1)
        return (self.drop(weights) @ value).transpose(1, 2).reshape(2, 3, 4)


class GroupedAttention(nn.Module):
    """Attention whose keys and values are repeated for groups of queries."""

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        batch, heads, length, width = key.shape
        many = key[:, :, None].expand(batch, heads, 2, length, width).reshape(batch, heads * 2, length, width)
        return F.scaled_dot_product_attention(query, many, many)


class Attention(nn.Module):
    """Attention over one head: three linears on one input, the key's without a bias, and a scale by division."""

    def __init__(self, size: int = 6, scale: float = 7) -> None:
        super().__init__()
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size, bias=False)
        self.value = nn.Linear(size, 2 * size)
        self.out = nn.Linear(2 * size, size)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / self.scale
        return self.out(scores.softmax(-1) @ self.value(x))


class OneToken(nn.Module):
    """A layer of a transformer with two heads of which few tokens are read: by their place (an integer or a slice), or
    by an index; with a mask, or causal with tables for the positions."""

    places: torch.Tensor

    def __init__(self, where: str, causal: bool = False) -> None:
        super().__init__()
        self.mix, self.out = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 4)
        self.norm, self.up, self.down, self.head = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 3)
        self.where, self.causal = where, causal
        self.register_buffer("places", torch.tensor([2, -1, 0, 2]))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x, mask = x.tanh(), mask.neg()
        query, key, value = (layer(x).view(*x.shape[:2], 2, 2).transpose(1, 2) for layer in self.mix)
        if self.causal:
            table = mask.cumsum(1)[:, None, :, None]
            query = query * table.cos() + torch.cat([-query[..., 1:], query[..., :1]], -1) * table.sin()
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask[:, None, :, None] + mask[:, None, None]
            )
        x = self.norm(x + self.out(mixed.transpose(1, 2).reshape(x.shape)))
        x = x + self.down(F.gelu(self.up(x)))
        if self.where == "index":
            return self.head(x)[:, self.places]
        return torch.tanh(self.head(x[:, 0])) if self.where == "first" else self.head(x)[:, -1:]


# --- examples: a model and its inputs, made anew at every call -------------------------------------------------------

attention = example_factory(Attention, (2, 3, 6))
decomposed_attention = example_factory(DecomposedAttention, (2, 3, 4), inference=True, export=True)
biased_attention = example_factory(lambda: DecomposedAttention(biased=True), (2, 3, 4), inference=True, export=True)
grouped_attention = example_factory(GroupedAttention, (2, 4, 3, 4), (2, 2, 3, 4), export=True)

causal_attention = example_factory(lambda: MaskedAttention("causal"), (2, 3, 4), export=True)
additive_causal_attention = example_factory(lambda: MaskedAttention("additive"), (2, 3, 4), export=True)
all_seeing_attention = example_factory(lambda: MaskedAttention("all"), (2, 3, 4), export=True)

positions = example_factory(Positions, (2, 3, 4), export=True)
rotary = example_factory(Rotary, (2, 3, 4), export=True)
first_token = example_factory(lambda: OneToken("first"), (2, 9, 4), (2, 9), inference=True, export=True)
last_token = example_factory(lambda: OneToken("last", causal=True), (2, 9, 4), (2, 9), inference=True, export=True)
indexed_tokens = example_factory(lambda: OneToken("index", causal=True), (2, 9, 4), (2, 9), inference=True, export=True)
