"""Embed a data set with plain torchrun: each process opens a saved folder once, and takes its share of the rows.

pip install "refold[save]"
python examples/encoder.py folder rows.jsonl
torchrun --nproc-per-node 2 examples/embed_with_torchrun.py folder rows.jsonl embeddings
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from encoder import WIDTH, Encoder, padded
from safetensors.torch import save_file
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

import refold


class Rows(Dataset[dict[str, Any]]):
    """The rows of a JSON-lines file."""

    def __init__(self, path: Path) -> None:
        self.lines = path.read_text().splitlines()

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, place: int) -> dict[str, Any]:
        row: dict[str, Any] = json.loads(self.lines[place])
        return row


def own_share(rows: Rows, rank: int, count: int) -> Subset[dict[str, Any]]:
    """The rows of one process. The sampler gives all processes as many, and repeats rows to that end; the repeated ones
    are the last, and left out here. (`drop_last=True` would lose rows instead.)"""
    sampler = DistributedSampler(rows, num_replicas=count, rank=rank, shuffle=False)
    return Subset(rows, list(sampler)[: len(range(rank, len(rows), count))])


def collated(rows: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows as tensors: their numbers, words and masks."""
    return torch.tensor([row["id"] for row in rows]), *padded([row["words"] for row in rows])


@torch.inference_mode()
def embed(folder: Path, share: Subset[dict[str, Any]], device: str) -> dict[str, torch.Tensor]:
    """The numbers of the rows of a share, and their embeddings."""
    model = refold.load(folder, Encoder, device=device)
    ids, embeddings = [torch.empty(0, dtype=torch.long)], [torch.empty(0, WIDTH)]
    for names, words, mask in DataLoader(share, batch_size=64, collate_fn=collated) if len(share) else ():
        ids.append(names)
        embeddings.append(model(words.to(device), mask.to(device)).cpu())
    return {"id": torch.cat(ids), "embedding": torch.cat(embeddings)}


def write_part(out: Path, rank: int, count: int, part: dict[str, torch.Tensor]) -> None:
    """Write a share, whole or not at all; started again, a process writes over its own part."""
    fresh = out / f".part-{rank}"
    save_file(part, fresh)
    os.replace(fresh, out / f"part-{rank:05d}-of-{count:05d}.safetensors")


def main(folder: Path, rows: Path, out: Path) -> None:
    dist.init_process_group("gloo")  # to wait for one another; no tensor moves between the processes
    rank, count = dist.get_rank(), dist.get_world_size()
    out.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        for left in out.glob("part-*.safetensors"):  # of an earlier run, maybe with other shares
            left.unlink()
    dist.barrier()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    write_part(out, rank, count, embed(folder, own_share(Rows(rows), rank, count), device))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("out", type=Path, help="a folder of safetensors files, one a process")
    options = parser.parse_args()
    main(options.folder, options.rows, options.out)
