"""Packed graphs in parts: the same numbers for every mask, from tokens rounded up, and densely where they must be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import refold
from refold import RemovePadding
from refold.errors import PreparationFailed
from refold.examples.padded_batches import PaddedEncoder
from refold.executors import Executor, Plain
from refold.executors.packed_cuda_graph import STEP, PackedCudaGraph, PackedRunner
from refold.executors.split_packing import split_packing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float64
MASKS = ("right", "left", "mixed", "full", "empty")


class Counting(Executor):
    """Runs what it is given as it is, and counts the calls."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.calls = module, 0

    def available(self, device: torch.device) -> str | None:
        return None

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return module(*args, **kwargs)

        return call


def batch(kind: str, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + length)
    mask = (torch.arange(length) < torch.tensor([length, 2, 3, length // 2 + 1][:rows])[:, None]).long()
    if kind == "left":
        mask = mask.flip(1)
    if kind == "mixed":
        mask = mask.gather(1, torch.rand(rows, length, generator=generator).argsort(1))
    if kind == "full":
        mask = torch.ones_like(mask)
    if kind == "empty":
        mask[1] = 0
    return torch.randint(0, 16, (rows, length), generator=generator).to(DEVICE), mask.to(DEVICE)


def packed(head: str) -> tuple[nn.Module, GraphModule]:
    torch.manual_seed(0)
    model = PaddedEncoder(head, size=16)
    model.positions = nn.Embedding(64, 16)
    model = model.to(DEVICE, DTYPE).eval()
    gm = RemovePadding()(refold.trace(model, *batch("right", 3, 8)))
    assert refold.result(gm).rewritten
    return model, gm


def way(gm: GraphModule) -> tuple[PackedRunner, list[Counting]]:
    made: list[Counting] = []

    def record(module: nn.Module, is_usual: bool) -> Counting:
        made.append(Counting(module))
        return made[-1]

    run = PackedCudaGraph(None if DEVICE == "cuda" else record).prepare(gm, batch("right", 3, 8), {})
    assert isinstance(run, PackedRunner)
    return run, made


@pytest.mark.parametrize("head", ["mean", "first", "causal"])
def test_every_mask_and_size(head: str) -> None:
    model, gm = packed(head)
    run, made = way(gm)
    bound = 0.05 if DEVICE == "cuda" else 1e-12
    with torch.no_grad():
        for kind in MASKS:
            for rows, length in ((3, 8), (4, 11), (2, 9)):
                ids, mask = batch(kind, rows, length)
                expected, found = model(ids, mask), run(ids, mask)
                assert torch.equal(expected.isnan(), found.isnan()), (kind, rows)
                scale = expected.nan_to_num().abs().max().clamp(min=1) if DEVICE == "cuda" else 1  # of half precision
                assert (expected - found).nan_to_num().abs().max() <= bound * scale, (kind, rows)
    if made:
        _plan, given, dense = made
        assert given.calls > 0 and dense.calls > 0, "both ways were taken"


def test_tokens_are_rounded_up_in_full_batches_too() -> None:
    _model, gm = packed("mean")
    run, _made = way(gm)
    seen: list[int] = []
    inner = run.packed
    run.packed = lambda *args, **kwargs: (seen.append(kwargs["refold_kept"].numel()), inner(*args, **kwargs))[1]
    with torch.no_grad():
        run(*batch("right", 3, 8))
        run(*batch("full", 3, 8))
        run(*batch("full", 3, 60))
        run(*batch("empty", 3, 8))
    assert seen == [STEP, STEP, 2 * STEP]


def test_what_is_not_packed_is_refused() -> None:
    ids, mask = batch("right", 3, 8)
    plain = refold.trace(PaddedEncoder().to(DEVICE).eval(), ids, mask)
    for module in (plain, nn.Linear(2, 2)):
        with pytest.raises(PreparationFailed):
            split_packing(module, STEP)
    assert Plain().available(torch.device(DEVICE)) is None
    assert "CUDA" in (PackedCudaGraph().available(torch.device("cpu")) or "")
