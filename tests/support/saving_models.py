"""Models that the tests of saving share with the processes they start."""

from __future__ import annotations

import torch
from torch import nn

import refold


class Mixed(nn.Module):
    """A convolution with two batch norms, linear layers on one input, a tie, a buffer that is not saved by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn, self.bn2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.q, self.k, self.v = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 6, bias=False)
        self.o, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.o.weight
        self.register_buffer("offset", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn2(self.bn(self.conv(x))).mean((2, 3))
        return self.tied(self.o(self.q(x) * self.k(x)) + self.offset) + self.v(x)[:, :4] / 7


def mixed(seed: int = 0, dtype: torch.dtype = torch.float32) -> Mixed:
    torch.manual_seed(seed)
    model = Mixed().eval()
    with torch.no_grad():
        for norm in (model.bn, model.bn2):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            norm.weight.normal_()
            norm.bias.normal_()
            norm.num_batches_tracked.fill_(seed + 3)
        model.offset.add_(seed)
    return model.to(dtype)


def everything() -> refold.Transformation:
    return refold.compose(
        refold.FuseBatchNorm2dInConv2d(),
        refold.MergeLinears(),
        refold.FuseBiasInLinear(),
        refold.ChangeTrueDivToMulByInverse(),
    )


def folded(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.fx.GraphModule:
    return everything()(torch.fx.symbolic_trace(mixed(seed, dtype)))
