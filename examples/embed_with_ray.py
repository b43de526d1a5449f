"""Embed a data set with Ray Data: each worker opens a saved folder once, and takes batches as it is free.

pip install "refold[ray,save]"
python examples/encoder.py folder rows.jsonl
python examples/embed_with_ray.py folder rows.jsonl embeddings --workers 2
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import ray
import ray.data
import torch
from encoder import Encoder, padded

import refold


class Embed:
    """A worker. Ray makes one in each of its processes, and another where a process died."""

    def __init__(self, folder: str) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = refold.load(folder, Encoder, device=self.device)
        self.embed([[0], [0, 0]])  # the first call is the slow one

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {"id": batch["id"], "embedding": list(self.embed(batch["words"]).numpy())}

    @torch.inference_mode()
    def embed(self, rows: Any) -> torch.Tensor:
        words, mask = padded(rows)
        return self.model(words.to(self.device), mask.to(self.device)).cpu()


def embedded(rows: str, folder: str, workers: int, worker: type = Embed, block: int = 512) -> Any:
    """The rows of a JSON-lines file (or of a folder of such files) with their embeddings, as a data set of Ray. Nothing
    is computed before it is asked for."""
    data = ray.data.read_json(rows).repartition(target_num_rows_per_block=block)
    return data.map_batches(
        worker,
        fn_constructor_args=(folder,),
        batch_size=64,
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_cpus=1,
        num_gpus=1 if torch.cuda.is_available() else 0,
    )


def start(workers: int) -> None:
    """Join the cluster that RAY_ADDRESS names, or begin one on this machine. Workers hold their processors as long as
    they live, so there must be one more: with none left to read the rows, Ray would wait for ever."""
    if "RAY_ADDRESS" in os.environ:
        ray.init()
    else:
        ray.init(num_cpus=max(workers + 1, os.cpu_count() or 1), include_dashboard=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("rows")
    parser.add_argument("out", help="a folder of Parquet files")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    start(options.workers)
    embedded(options.rows, options.folder, options.workers).write_parquet(options.out, mode="overwrite")
