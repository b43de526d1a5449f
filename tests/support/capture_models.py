"""Small models that several tests of capture use, and their inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx, nn


def seeded(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def targets(graph: fx.Graph, op: str) -> list[Any]:
    return [n.target for n in graph.nodes if n.op == op]


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.norm(self.linear(x)) * scale


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: list[torch.Tensor]


class Manners(nn.Module):
    """Positional, keyword, default, nested and plain arguments; a tied weight; a module nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleDict({"b": Block(), "a": Block()})
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(3, 3)
        self.register_buffer("shift", torch.ones(4), persistent=False)
        self.scale = nn.Parameter(torch.full((4,), 2.0))

    def forward(
        self, ids: torch.Tensor, extra: dict[str, torch.Tensor] | None = None, *, mode: str = "sum", power: int = 1
    ) -> Pair:
        x = self.blocks["a"](self.embedding(ids)) * self.scale + self.shift
        x = self.blocks["a"](x) if mode == "sum" else x
        if extra is not None:
            x = x + extra["bias"]
        return Pair(left=self.head(x), right=[x**power])
