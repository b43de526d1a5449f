"""Zeros at padding are right where a transformation says so, and only the zeros: all else is compared as always."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import refold
from refold import RemovePadding
from refold.patterns.packing.token_operators import OPERATORS
from refold.rewrite.editor import Editor
from refold.rewrite.rule import Site


class Encoder(nn.Module):
    """Values for each token, and a mean of the real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first, self.second = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(self.words(ids))[:, None]
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask[:, None, None, :] != 0)[:, 0]
        x = self.second(x)
        return {"hidden": x, "mean": (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)}


class Promising(RemovePadding):
    """Zeros at padding by a transformation that promises to preserve what is computed."""

    preserves_computation = True  # type: ignore[assignment]


class Defective(RemovePadding):
    """Real tokens are a little wrong."""

    def rewrite(self, site: Site, edit: Editor) -> None:
        super().rewrite(site, edit)
        zeros: Any = next(n for n in edit.gm.graph.nodes if n.target is OPERATORS.zero_padding.default)
        wrong = edit.call(zeros, torch.ops.aten.mul.Tensor, zeros.args[0], 1.001)
        zeros.replace_input_with(zeros.args[0], wrong)


def verified(transformation: RemovePadding) -> tuple[refold.Verification, refold.Verification]:
    torch.manual_seed(0)
    model = Encoder().eval()
    inputs = {"ids": torch.randint(0, 20, (3, 7)), "mask": (torch.arange(7) < torch.tensor([[7], [2], [4]])).long()}
    gm = refold.trace(copy.deepcopy(model), dynamic="auto", **inputs)
    gm = transformation(gm)
    assert refold.result(gm)
    found = refold.verify(gm, inputs, transformations=[transformation])
    return found, refold.verify(gm, inputs, original=model, transformations=[transformation])


def test_zeros_that_are_said_are_right() -> None:
    for found in verified(RemovePadding(padding="zeros")):
        assert found.right and found.grade in ("bit-identical", "same error class"), str(found)


def test_zeros_against_a_promise_are_wrong() -> None:
    for found in verified(Promising(padding="zeros")):
        assert not found.right and found.grade == "wrong", str(found)


def test_defects_beside_the_zeros_are_found() -> None:
    for found in verified(Defective(padding="zeros")):
        assert not found.right, str(found)
