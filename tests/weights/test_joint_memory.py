"""Tensors that lie one behind the other are put together over their own memory, and only those."""

from __future__ import annotations

import pytest
import torch

from refold.weights.joint_memory import joint_memory

WHOLE = torch.arange(24.0).reshape(6, 4)


@pytest.mark.parametrize("sizes", [(6,), (2, 4), (1, 2, 3), (2, 0, 4)])
def test_parts_in_their_order_are_the_whole(sizes: tuple[int, ...]) -> None:
    parts = [torch.nn.Parameter(part) for part in WHOLE.split(list(sizes))]
    whole = joint_memory(parts)
    assert whole is not None and torch.equal(whole, WHOLE)
    assert whole.data_ptr() == WHOLE.data_ptr() and whole.is_contiguous() and not whole.requires_grad
    version = whole._version
    with torch.no_grad():
        parts[0].mul_(1)
    assert whole._version == version


def test_vectors_and_parts_of_the_middle() -> None:
    vector = torch.arange(9.0)
    assert torch.equal(joint_memory([vector[2:4], vector[4:7]]), vector[2:7])


@pytest.mark.parametrize(
    "parts",
    [
        [WHOLE[2:], WHOLE[:2]],
        [WHOLE[:2], WHOLE[3:]],
        [WHOLE[:2], WHOLE[2:].clone()],
        [WHOLE[:, :2], WHOLE[:, 2:]],
        [WHOLE[:2], WHOLE[:2]],
        [torch.empty(2, 4, device="meta"), torch.empty(2, 4, device="meta")],
    ],
    ids=["another order", "a gap", "another memory", "columns", "the same twice", "no memory"],
)
def test_anything_else_is_not(parts: list[torch.Tensor]) -> None:
    assert joint_memory(parts) is None
