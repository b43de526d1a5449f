"""Small models that the newer rewrites fire on: their examples in the laws and the documentation.

(Annotations are real classes here, not strings: torch cannot unpickle the graph of a model whose annotations are.)
"""

import math

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


def dropouts() -> Example:
    """Dropouts and identities, for inference."""
    return seeded(lambda: (Dropouts().eval(), (torch.randn(2, 4),)))


def idle_layers() -> Example:
    """Calls that give back their input."""
    return exported(seeded(lambda: (Idle(), (torch.randn(2, 3, 4),))))


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


def positions() -> Example:
    """Positions that depend on no input."""
    return exported(seeded(lambda: (Positions(), (torch.randn(2, 3, 4),))))


def rotary() -> Example:
    """A table made from a buffer."""
    return exported(seeded(lambda: (Rotary(), (torch.randn(2, 3, 4),))))


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


def norms_behind() -> Example:
    """Batch norms behind convolutions."""
    return exported(seeded(lambda: (NormsBehind().eval(), (torch.randn(2, 3, 4),))))


def norms_before() -> Example:
    """Batch norms before layers."""
    return seeded(lambda: (NormsBefore().eval(), (torch.randn(2, 3, 3, 3),)))


def norm_of_rows() -> Example:
    """A batch norm over rows."""
    return exported(seeded(lambda: (NormOfRows().eval(), (torch.randn(2, 5, 3),))))


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


def twice_the_same() -> Example:
    """Common subexpressions."""
    return seeded(lambda: (TwiceTheSame(), (torch.randn(3, 4),)))


def calls_twice() -> Example:
    """A layer called twice."""
    return seeded(lambda: (CallsTwice(), (torch.randn(3, 4),)))


class WrittenAttention(nn.Module):
    """Attention over two heads, written out in single steps, with a bias of its own where asked for."""

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


def written_attention() -> Example:
    """Attention written out."""
    return exported(seeded(lambda: (WrittenAttention().eval(), (torch.randn(2, 3, 4),))))


def biased_attention() -> Example:
    """Attention written out, with a learned bias."""
    return exported(seeded(lambda: (WrittenAttention(biased=True).eval(), (torch.randn(2, 3, 4),))))


def grouped_attention() -> Example:
    """Attention with repeated heads."""
    return exported(seeded(lambda: (GroupedAttention(), (torch.randn(2, 4, 3, 4), torch.randn(2, 2, 3, 4)))))


class Conv1Ds(nn.Module):
    """Linear layers in the manner of GPT-2: weights of (in, out), applied to rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))
        self.second, self.second_bias = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.addmm(self.first_bias, x, self.first).relu()
        return torch.cat([first, torch.addmm(self.second_bias, x, self.second).view(2, 5)], -1)


def conv1ds() -> Example:
    """Two Conv1Ds on one input."""
    return seeded(lambda: (Conv1Ds(), (torch.randn(2, 4),)))


class Branches(nn.Module):
    """Convolutions of equal geometry on one input, as in an inception block, and one of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 2, 3, padding=1)
        self.right = nn.Conv2d(3, 4, 3, padding=1)
        self.other = nn.Conv2d(3, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.left(x).relu(), self.right(x), self.other(x)], 1)


def branches() -> Example:
    """Parallel convolutions."""
    return seeded(lambda: (Branches(), (torch.randn(2, 3, 4, 4),)))


def exported_branches() -> Example:
    """Parallel convolutions as ATen operators."""
    return exported(branches())


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


def images() -> Example:
    """A small convolutional network, for inference."""
    return seeded(lambda: (Images().eval(), (torch.randn(2, 3, 6, 6),)))


def exported_images() -> Example:
    """The same as ATen operators."""
    return exported(images())


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


def padded() -> Example:
    """Images padded before convolutions."""
    return seeded(lambda: (Padded(), (torch.randn(2, 3, 6, 7),)))


def exported_padded() -> Example:
    """The same as ATen operators."""
    return exported(padded())


class Pooled(nn.Module):
    """A pool with a window larger than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(9, ceil_mode=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(x.sin()).flatten(1)


def pooled() -> Example:
    """A pool with a window larger than its input, captured for that input."""
    return exported(seeded(lambda: (Pooled(), (torch.randn(2, 3, 5, 4),))))


class WrittenActivations(nn.Module):
    """Layers with activations that are written out: GELU in both forms, SiLU, Mish and Hardswish."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.gate = nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d, e = (layer(x) for layer in self.layers)
        a = 0.5 * a * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a.pow(3))))
        b = b * (1 + torch.erf(b / math.sqrt(2))) / 2
        return a + b + c * self.gate(c) + d * F.softplus(d).tanh() + e * F.relu6(e + 3) / 6


def written_activations() -> Example:
    """Activations that are written out in arithmetic."""
    return seeded(lambda: (WrittenActivations(), (torch.randn(3, 4),)))


def exported_written_activations() -> Example:
    """The same as ATen operators."""
    return exported(written_activations())
