"""Small models, ways to shard them, and comparisons, for the checks that run on several ranks.

(Annotations are real classes here, not strings: torch cannot unpickle the graph of a model whose annotations are.)
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.fx import GraphModule, symbolic_trace

import refold


class Everything(nn.Module):
    """A batch norm to fold, linear layers of different and odd widths to merge, and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.query, self.key, self.value = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(6, 7)
        self.down, self.up = nn.Linear(6, 3, bias=False), nn.Linear(3, 5, bias=False)
        self.adapted = nn.Linear(6, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(image)).mean((2, 3))
        low_rank = self.up(self.down(x)) * 0.5
        return torch.cat([self.query(x).tanh(), self.key(x), self.value(x).sin(), self.adapted(x) + low_rank], -1)


class Gated(nn.Module):
    """Two layers that are divided by columns, and one by rows."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.gate, self.up, self.out = nn.Linear(6, width), nn.Linear(6, width), nn.Linear(width, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.gate(x).tanh() * self.up(x))


def everything(seed: int = 0) -> Everything:
    torch.manual_seed(seed)
    model = Everything().eval()
    with torch.no_grad():
        model.norm.running_mean.normal_()
        model.norm.running_var.uniform_(0.5, 2)
        model.norm.weight.normal_()
        model.norm.bias.normal_()
    return model


def gated(width: int = 8) -> Gated:
    torch.manual_seed(1)
    return Gated(width)


def images() -> torch.Tensor:
    return torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(7))


def rows() -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(7))


def rewrites() -> Any:
    return refold.compose(refold.FoldBatchNorm(), refold.MergeLora(), refold.MergeLinears())


def by_columns_and_rows(name: str) -> list[Any]:
    """How the parameters of `Gated` are divided in tensor parallelism."""
    return {"out.weight": [Shard(1)], "out.bias": [Replicate()]}.get(name, [Shard(0)])


def divided(model: nn.Module, mesh: Any, placements: Callable[[str], list[Any]]) -> GraphModule:
    """The graph of a model whose parameters are DTensors; nothing is hooked onto it."""
    for name, tensor in list(model.named_parameters()):
        owner, _, key = name.rpartition(".")
        sharded = distribute_tensor(tensor.detach(), mesh, placements(name))
        setattr(model.get_submodule(owner), key, nn.Parameter(sharded))
    return symbolic_trace(model)


def whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for k, t in tensors.items()}


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """The same names and the same bits."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    gathered = whole(found)
    assert [name for name, tensor in whole(wanted).items() if not torch.equal(gathered[name], tensor)] == []


def assert_same_objects(module: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    now = dict(module.named_parameters())
    assert now.keys() == before.keys()
    assert [name for name in before if now[name] is not before[name]] == []


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal up to roundings of float32, in results that add up some tens of terms of the order of 1."""
    gathered = found.full_tensor() if isinstance(found, DTensor) else found
    assert float((gathered - wanted).detach().abs().max()) <= 64 * torch.finfo(torch.float32).eps
