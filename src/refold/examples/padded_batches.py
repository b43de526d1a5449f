"""Models of padded batches: ids, and a mask that says which of them are real tokens.

(Annotations are real classes here, not strings: torch cannot unpickle the graph of a model whose annotations are.)
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from refold.examples import Example, seeded


class PaddedEncoder(nn.Module):
    """One layer of attention over two heads, with learned positions; a classifier of the mean or the first token, or
    what a causal model says of its own words."""

    def __init__(self, head: str = "mean", words: int = 16, size: int = 8) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, size), nn.Embedding(12, size)
        self.mix, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, words if head == "causal" else 3)
        self.kind = head

    def attend(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attention to real tokens, to earlier ones where the model is causal."""
        seen = mask[:, None, None, :] != 0
        if self.kind == "causal":
            places = torch.arange(mask.shape[1], device=mask.device)
            seen = seen & (places[None, :] <= places[:, None])
        query, key, value = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.mix(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return self.out(found.transpose(1, 2).flatten(2))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.norm(x + self.attend(x, mask))
        if self.kind == "first":
            return self.head(x[:, 0])
        if self.kind == "mean":
            return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        told = self.head(x)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        return (told * mask[:, 1:]).sum(1)


def _padded(head: str) -> Callable[[], Example]:
    def make() -> Example:
        model = PaddedEncoder(head).eval()
        ids = torch.randint(0, 16, (3, 7))
        mask = (torch.arange(7) < torch.tensor([[7], [2], [4]])).long()
        sizes = {0: torch.export.Dim("rows", min=2), 1: torch.export.Dim("length", min=4, max=12)}
        program = torch.export.export(model, (ids, mask), dynamic_shapes=(sizes, sizes), strict=False)
        return program.module(check_guards=False), (ids, mask)

    return lambda: seeded(make)


classifier = _padded("mean")
causal_scores = _padded("causal")
