"""Random models for hypothesis: mixtures of the blocks that rewrites fire on and of the traps they must see.

(Annotations are real classes here, not strings: torch cannot unpickle the graph of a model whose annotations are.)
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from refold.examples import Example, seeded
from refold.examples.attention_layers import Attention
from refold.examples.layers import Gated

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

SIZE = 4


class Normed(nn.Module):
    """Linear and batch norm, in either order, over rows."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        layer, norm = nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE)
        self.parts = nn.Sequential(norm, layer) if norm_first else nn.Sequential(layer, norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(x.reshape(-1, SIZE)).reshape(x.shape)


class Convolved(nn.Module):
    """Convolution and batch norm over what is seen as an image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x.unsqueeze(1))).mean(1)


class WritesBetween(nn.Module):
    """Two linears on one input that is written to between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.second = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 0.5
        first = self.first(x)
        x.add_(1)
        return first.relu_() + self.second(x)


class Shared(nn.Module):
    """A linear that is called twice, one that is tied to it, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(SIZE, SIZE)
        self.tied = nn.Linear(SIZE, SIZE, bias=False)
        self.own = nn.Linear(SIZE, SIZE, bias=False)
        self.tied.weight = self.twice.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.twice(self.twice(x)) / 5 + self.tied(x) + self.own(x)


class Sliced(nn.Module):
    """Two linears whose outputs are viewed, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, 2 * SIZE)
        self.second = nn.Linear(SIZE, 2 * SIZE, bias=False)
        self.frozen = nn.Linear(SIZE, SIZE).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.first(x).view(x.size(0), -1, 2, SIZE)
        return heads.sum(2) * self.second(x).reshape(x.size(0), -1, 2, SIZE).sum(2) / 3.7 + self.frozen(x)


class Grouped(nn.Module):
    """A transposed convolution in groups, with more outputs than inputs, and its batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Conv2d(1, 4, 1)
        self.conv = nn.ConvTranspose2d(4, 6, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(self.widen(x.unsqueeze(1)))).mean(1)


class LookedUp(nn.Module):
    """A branch of integers: rows of a table, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = x.argmax(-1)
        rows = self.table(places) / (places.unsqueeze(-1) // 2 + 2)
        return torch.where((places > 1).unsqueeze(-1), rows, x.masked_fill(x > 0, 0.0) / 3)


class Queried(nn.Module):
    """Linears on a learned query, which is no input of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, SIZE))
        self.first = nn.Linear(SIZE, SIZE)
        self.second = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.query) * x + self.second(self.query)


_BLOCKS: dict[str, Any] = {
    "attention": lambda: Attention(SIZE, 7),
    "gated": lambda: Gated(SIZE, 3, bias=True),
    "linear then norm": lambda: Normed(False),
    "norm then linear": lambda: Normed(True),
    "convolution": Convolved,
    "writes between": WritesBetween,
    "transposed convolution": Grouped,
    "integers": LookedUp,
    "learned query": Queried,
    "shared": Shared,
    "sliced": Sliced,
    "activation": lambda: nn.GELU(),
}


class Blocks(nn.Module):
    """Blocks one after the other, each added to what went through."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_BLOCKS[kind]() for kind in kinds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = (x + block(x)) / 2
        return x


def build(kinds: list[str], seed: int) -> Example:
    """The model of some blocks, for inference, and an input for it."""
    return seeded(lambda: (Blocks(kinds).eval(), (torch.randn(2, 3, SIZE),)), seed)


def random_models(most: int = 3) -> "SearchStrategy[Example]":
    """A hypothesis strategy for (model, inputs) pairs."""
    from hypothesis import strategies as st

    kinds = st.lists(st.sampled_from(sorted(_BLOCKS)), min_size=1, max_size=most)
    return st.builds(build, kinds, st.integers(0, 1000))
