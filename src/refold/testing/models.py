"""Small models that rewrites fire on, as examples for rules, laws and documentation.

(Annotations are real classes here, not strings: torch cannot unpickle the graph of a model whose annotations are.)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Example = tuple[nn.Module, tuple[Any, ...]]


def seeded(make: Callable[[], Example], seed: int = 0) -> Example:
    """An example made with the random numbers of a seed; the caller's own are left as they were. Batch norms get
    statistics as training would give them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, inputs = make()
        settle(model)
    return model, inputs


@torch.no_grad()
def settle(model: nn.Module) -> nn.Module:
    """Give every batch norm statistics and an affine map that are not trivial."""
    for module in model.modules():
        if not isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            continue
        if module.running_mean is not None and module.running_var is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
        if module.affine:
            module.weight.uniform_(0.5, 2.0).mul_(torch.sign(torch.randn_like(module.weight)))
            module.bias.normal_()
    return model


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


class Gated(nn.Module):
    """A gated feed-forward layer: gate and up read the same input, in a residual branch."""

    def __init__(self, size: int = 6, inner: int = 9, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(size, inner, bias=bias)
        self.up = nn.Linear(size, inner, bias=bias)
        self.down = nn.Linear(inner, size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Functional(nn.Module):
    """Linears, a convolution and a batch norm called as functions, with parameters of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(5, 4))
        self.second = nn.Parameter(torch.randn(3, 4))
        self.bias = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.linear(x, self.first), F.linear(x, self.second, self.bias)], -1) / 3


class ConvNorm(nn.Module):
    """Convolutions with batch norms behind them: with and without a bias, grouped, dilated and padded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.first_norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 6, 3, groups=2, dilation=2, padding=2, bias=False)
        self.second_norm = nn.BatchNorm2d(6, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second_norm(self.second(self.first_norm(self.first(x)).relu()))


def attention() -> Example:
    """An attention layer in training mode."""
    return seeded(lambda: (Attention(), (torch.randn(2, 3, 6),)))


def gated() -> Example:
    """A gated feed-forward layer."""
    return seeded(lambda: (Gated(), (torch.randn(2, 6),)))


def functional() -> Example:
    """Linears called as functions."""
    return seeded(lambda: (Functional(), (torch.randn(2, 4),)))


def conv_norm() -> Example:
    """Two convolutions, each with a batch norm behind it, for inference."""
    return seeded(lambda: (ConvNorm().eval(), (torch.randn(2, 3, 6, 6),)))


def linear_norm() -> Example:
    """Linear, then batch norm, for inference."""
    return seeded(lambda: (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU()).eval(), (torch.randn(3, 4),)))


def norm_linear() -> Example:
    """Batch norm, then linear without a bias, for inference."""
    model = lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6, bias=False)).eval()  # noqa: E731
    return seeded(lambda: (model(), (torch.randn(3, 4),)))


def nothing() -> Example:
    """A model that computes nothing: no rewrite has anything to do here."""
    return nn.Identity(), (torch.ones(2),)


def exported(example: Example) -> Example:
    """The same model as `torch.export` sees it: ATen operators, parameters fetched by get_attr."""
    model, inputs = example
    return torch.export.export(model, inputs, strict=False).module(), inputs
