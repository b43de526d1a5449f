"""The model of the examples, a saved folder of it, and rows to embed.

python examples/encoder.py folder rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import refold

WORDS, WIDTH = 1000, 64


class Layer(nn.Module):
    """Attention and a feed-forward part, each added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.more = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        parts = self.query(x), self.key(x), self.value(x)
        x = x + nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask[:, None, :])
        return x + self.more(self.norm(x))


class Encoder(nn.Module):
    """Texts as numbers of words to vectors: the mean over the words that the mask has."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x, mask)
        return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def padded(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The words of rows as one tensor, and where there are words."""
    tensors = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    words = nn.utils.rnn.pad_sequence(tensors, batch_first=True)
    lengths = torch.tensor([len(tensor) for tensor in tensors])
    return words, torch.arange(words.shape[1]) < lengths[:, None]


def save_folder(folder: Path) -> nn.Module:
    """Rewrite an encoder and save it; `refold.load(folder, Encoder)` opens it anywhere."""
    model = Encoder().eval()
    gm = refold.trace(model, *padded([[1, 2, 3], [4]]))
    refold.MergeLinears()(gm)
    refold.save(gm, folder)
    return model


def write_rows(path: Path, count: int, seed: int = 0) -> None:
    """Rows of random words, a JSON object a line."""
    drawn = random.Random(seed)
    rows = ({"id": i, "words": drawn.choices(range(WORDS), k=drawn.randint(1, 32))} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--count", type=int, default=10_000)
    options = parser.parse_args()
    save_folder(options.folder)
    write_rows(options.rows, options.count)
