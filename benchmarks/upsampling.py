"""What SplitUpsampling is worth in a diffusion decoder of the shape of diffusers' AutoencoderKL, in plain PyTorch.

python benchmarks/upsampling.py --device cpu        writes benchmarks/results/upsampling_cpu.json
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from one_rule import Row, main

from refold import SplitUpsampling


class Residual(nn.Module):
    """Two normalised convolutions and what stood before them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class PixelAttention(nn.Module):
    """Attention of all pixels to all, with one head."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, size)
        self.query, self.key, self.value, self.out = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.query(pixels), self.key(pixels), self.value(pixels)
        mixed = self.out(F.scaled_dot_product_attention(q, k, v))
        return x + mixed.transpose(1, 2).reshape(x.shape)


class Upsampler(nn.Module):
    """Twice the size, and a convolution."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(size, size, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Decoder(nn.Module):
    """From a latent image of four channels to one of eight times its size."""

    def __init__(self, base: int, factors: tuple[int, ...] = (4, 4, 2, 1), residuals: int = 3) -> None:
        super().__init__()
        size = base * factors[0]
        layers: list[nn.Module] = [nn.Conv2d(4, size, 3, padding=1), Residual(size, size)]
        layers += [PixelAttention(size), Residual(size, size)]
        for level, factor in enumerate(factors):
            for _ in range(residuals):
                layers.append(Residual(size, base * factor))
                size = base * factor
            if level < len(factors) - 1:
                layers.append(Upsampler(size))
        self.layers = nn.Sequential(*layers, nn.GroupNorm(32, size), nn.SiLU(), nn.Conv2d(size, 3, 3, padding=1))

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        return self.layers(latent)


def row(base: int, height: int, batch: int = 1) -> Row:
    def make() -> tuple[nn.Module, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        return Decoder(base), {"latent": torch.randn(batch, 4, height, height)}

    return f"decoder of {base} channels, {batch} × {height}²", make


ROWS = {"cpu": [row(128, 16), row(64, 32)], "cuda": [row(128, 32), row(128, 64, 4)]}

if __name__ == "__main__":
    main(SplitUpsampling(), "upsampling", ROWS["cuda" if "cuda" in sys.argv else "cpu"])
