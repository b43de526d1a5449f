"""Linears, convolutions, norms, padding, pools and activations, as small models that rewrites fire on.

(Annotations are real classes here, not strings: torch cannot unpickle the graph of a model whose annotations are.)
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from refold.examples import Example, example_factory


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
    """Linears called as functions, with parameters of the module's own."""

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


class Dropouts(nn.Module):
    """A layer between dropouts and identities, for inference."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Dropout(0.1)
        self.layer = nn.Linear(4, 4)
        self.after = nn.Sequential(nn.Identity(), nn.Dropout(0.5, inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.after(self.layer(self.before(x)))
        return F.dropout(y, 0.1, training=False) + x


class Idle(nn.Module):
    """Reshapes, transposes and arithmetic that do nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.relu().transpose(1, 2).transpose(1, 2)
        y = y.reshape(y.shape[0], -1).reshape(x.shape) * 1.0
        return y.neg().neg().sin().expand(x.shape) * 2 - 0


class NormsBehind(nn.Module):
    """Convolutions of all kinds with batch norms behind them, for inference."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU())
        self.grow = nn.Sequential(nn.ConvTranspose1d(4, 6, 2, stride=2, groups=2, bias=False), nn.BatchNorm1d(6))
        self.cube = nn.Sequential(nn.Conv3d(3, 2, 1), nn.BatchNorm3d(2, affine=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cube = self.cube(x.reshape(2, 3, 2, 2, 1))
        return self.grow(self.line(x)).sum(1) + cube.flatten(1)


class NormsBefore(nn.Module):
    """Batch norms before layers that pad nothing, for inference."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 2, bias=False))
        self.mirrored = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"))
        self.linear = nn.Sequential(nn.BatchNorm1d(12), nn.Linear(12, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.mirrored(self.conv(x).relu()).flatten(1))


class NormOfRows(nn.Module):
    """A linear layer over positions, and a batch norm over them as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return self.norm(y.flatten(0, 1)).reshape_as(y)


class TwiceTheSame(nn.Module):
    """The same values computed twice, by calls that depend on each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = (x.sin() * 2).transpose(0, 1) @ x
        second = (x.sin() * 2).transpose(0, 1) @ x
        return first + second * (x.sin() * 2.5).sum()


class CallsTwice(nn.Module):
    """A layer called twice on one input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu() + self.layer(x).tanh()


class Adapted(nn.Module):
    """A linear layer with a low-rank adapter: scaled, behind an idle dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.dropout = nn.Dropout(0.1)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x) + self.up(self.down(self.dropout(x))) * 2.0)


class Conv1Ds(nn.Module):
    """Linear layers in the manner of GPT-2: weights of (in, out), applied to rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))
        self.second, self.second_bias = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.addmm(self.first_bias, x, self.first).relu()
        return torch.cat([first, torch.addmm(self.second_bias, x, self.second).view(2, 5)], -1)


class Branches(nn.Module):
    """Convolutions of equal geometry on one input, as in an inception block, and one of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 2, 3, padding=1)
        self.right = nn.Conv2d(3, 4, 3, padding=1)
        self.other = nn.Conv2d(3, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.left(x).relu(), self.right(x), self.other(x)], 1)


class Images(nn.Module):
    """Convolutions and what stands between them, up to a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, stride=2)
        self.head = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.second(self.norm(self.first(x)).relu())
        return self.head(y.reshape(2, 16)), y


class Padded(nn.Module):
    """Zeros put around images before convolutions: by a module, by a function, once more than the convolution does
    itself, and only along one axis."""

    def __init__(self) -> None:
        super().__init__()
        self.pad = nn.ZeroPad2d(1)
        self.depthwise = nn.Conv2d(3, 3, 3, groups=3, bias=False)
        self.wide = nn.Conv2d(3, 4, (3, 5), stride=2, padding=(0, 1))
        self.rows = nn.Conv1d(4, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.depthwise(self.pad(x)).relu()
        x = self.wide(F.pad(x, (1, 1, 2, 2))).relu()
        return self.rows(F.pad(x.flatten(2), (1, 1)))


class Upsampled(nn.Module):
    """Images doubled by repeating their values, with convolutions behind that: by modules, by functions, by a size, and
    along one axis only."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.UpsamplingNearest2d(scale_factor=2)
        self.square = nn.Conv2d(2, 3, 3, padding=1)
        self.wide = nn.Conv2d(3, 2, (4, 5), padding=(1, 2), bias=False)
        self.row = nn.Sequential(nn.Upsample(scale_factor=(2.0,), mode="nearest-exact"), nn.Conv1d(2, 3, 3))
        self.weight = nn.Parameter(torch.randn(2, 3, 3, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.square(self.up(x)).relu()
        x = self.wide(F.interpolate(x, scale_factor=(1, 2)))
        y = self.row(x.flatten(2))
        return F.conv2d(F.interpolate(y[:, :, :, None], scale_factor=(4, 1)), self.weight, padding="same"), x


class Pooled(nn.Module):
    """A pool with a window larger than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(9, ceil_mode=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(x.sin()).flatten(1)


class DecomposedActivations(nn.Module):
    """Layers with activations decomposed into arithmetic: GELU in both forms, SiLU, Mish and Hardswish."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.gate = nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d, e = (layer(x) for layer in self.layers)
        a = 0.5 * a * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a.pow(3))))
        b = b * (1 + torch.erf(b / math.sqrt(2))) / 2
        return a + b + c * self.gate(c) + d * F.softplus(d).tanh() + e * F.relu6(e + 3) / 6


# --- examples: a model and its inputs, made anew at every call -------------------------------------------------------

gated = example_factory(Gated, (2, 6))
functional = example_factory(Functional, (2, 4))
conv1ds = example_factory(Conv1Ds, (2, 4))
adapted = example_factory(Adapted, (3, 6), inference=True)

conv_norm = example_factory(ConvNorm, (2, 3, 6, 6), inference=True)
linear_norm = example_factory(
    lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU()), (3, 4), inference=True
)
norm_linear = example_factory(
    lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6, bias=False)), (3, 4), inference=True
)
norms_behind = example_factory(NormsBehind, (2, 3, 4), inference=True, export=True)
norms_before = example_factory(NormsBefore, (2, 3, 3, 3), inference=True)
norm_of_rows = example_factory(NormOfRows, (2, 5, 3), inference=True, export=True)

dropouts = example_factory(Dropouts, (2, 4), inference=True)
idle_layers = example_factory(Idle, (2, 3, 4), export=True)
twice_the_same = example_factory(TwiceTheSame, (3, 4))
calls_twice = example_factory(CallsTwice, (3, 4))

branches = example_factory(Branches, (2, 3, 4, 4))
exported_branches = example_factory(Branches, (2, 3, 4, 4), export=True)
images = example_factory(Images, (2, 3, 6, 6), inference=True)
exported_images = example_factory(Images, (2, 3, 6, 6), inference=True, export=True)
padded = example_factory(Padded, (2, 3, 6, 7))
exported_padded = example_factory(Padded, (2, 3, 6, 7), export=True)
upsampled = example_factory(Upsampled, (2, 2, 3, 4))
exported_upsampled = example_factory(Upsampled, (2, 2, 3, 4), export=True)
pooled = example_factory(Pooled, (2, 3, 5, 4), export=True)
decomposed_activations = example_factory(DecomposedActivations, (3, 4))
exported_decomposed_activations = example_factory(DecomposedActivations, (3, 4), export=True)


def nothing() -> Example:
    """A model that computes nothing: no rewrite has anything to do here."""
    return nn.Identity(), (torch.ones(2),)
