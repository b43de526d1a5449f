"""Run by a test: rows are embedded by two workers of Ray, one of which is killed in the middle. What came out, and
which processes opened the folder, goes into a JSON file."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from embed_with_ray import Embed, embedded, start
from encoder import save_folder, write_rows

ROWS, FATAL = 700, 300
place = Path(sys.argv[1])


class Dying(Embed):
    """A worker that notes that it opened the folder, and is killed over one of the rows, once."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        (Path(folder).parent / f"opened-{os.getpid()}").touch()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        note = place / "killed"
        if FATAL in batch["id"] and not note.exists():
            note.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch) | {"worker": [os.getpid()] * len(batch["id"])}


def main() -> dict[str, Any]:
    torch.manual_seed(0)
    model = save_folder(place / "folder")
    write_rows(place / "rows.jsonl", ROWS)
    torch.save(model.state_dict(), place / "weights.pt")
    start(workers=2)
    rows = embedded(str(place / "rows.jsonl"), str(place / "folder"), 2, Dying, block=100).take_all()
    ray.shutdown()
    return {
        "ids": [int(row["id"]) for row in rows],
        "embeddings": [list(map(float, row["embedding"])) for row in rows],
        "workers": sorted({int(row["worker"]) for row in rows}),
        "opened": sorted(int(path.name.partition("-")[2]) for path in place.glob("opened-*")),
        "killed": int((place / "killed").read_text()),
    }


if __name__ == "__main__":
    (place / "found.json").write_text(json.dumps(main()))
