"""The examples of many workers: every row comes out once, whoever embeds it and whoever dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from embed_with_torchrun import Rows, own_share
from encoder import Encoder, padded, save_folder, write_rows

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def ran(*command: str | Path) -> None:
    """Run a program with the examples within its reach; what it says is told where it fails."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]


def assert_embedded(model: torch.nn.Module, rows: Path, found: dict[int, torch.Tensor]) -> None:
    """Every row, each by itself through the model that was saved, has the embedding that was found."""
    for row in map(json.loads, rows.read_text().splitlines()):
        with torch.no_grad():
            torch.testing.assert_close(found[row["id"]], model(*padded([row["words"]]))[0])


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7])
def test_shares_have_every_row_once_although_the_sampler_repeats_rows(count: int, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", count)
    rows = Rows(tmp_path / "rows.jsonl")
    shares = [own_share(rows, rank, 3) for rank in range(3)]
    assert sorted(row["id"] for share in shares for row in share) == list(range(count))


def test_torchrun_embeds_every_row_once(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    torch.manual_seed(0)
    count = 101
    model, rows, out = save_folder(tmp_path / "folder"), tmp_path / "rows.jsonl", tmp_path / "out"
    write_rows(rows, count)
    out.mkdir()
    (out / "part-00002-of-00003.safetensors").write_bytes(b"of an earlier run with three processes")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran(*launcher, EXAMPLES / "embed_with_torchrun.py", tmp_path / "folder", rows, out)
    parts = [load_file(path) for path in sorted(out.iterdir())]
    assert [len(part["id"]) for part in parts] == [count - count // 2, count // 2]
    assert sorted(torch.cat([part["id"] for part in parts]).tolist()) == list(range(count))
    embeddings = {int(i): e for part in parts for i, e in zip(part["id"], part["embedding"], strict=True)}
    assert_embedded(model, rows, embeddings)


def test_a_worker_of_ray_that_is_killed_loses_and_doubles_no_row(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[data]'")
    pytest.importorskip("pyarrow", reason="Ray Data needs pyarrow: pip install 'ray[data]'")
    ran(Path(__file__).parent / "dying_worker.py", tmp_path)
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
    assert sorted(found["ids"]) == list(range(700))
    assert len(found["opened"]) == 3  # two workers, and the one in the place of the killed
    assert found["killed"] in found["opened"] and set(found["workers"]) <= set(found["opened"])
    model = Encoder().eval()
    model.load_state_dict(torch.load(tmp_path / "weights.pt"))
    pairs = zip(found["ids"], found["embeddings"], strict=True)
    assert_embedded(model, tmp_path / "rows.jsonl", {i: torch.tensor(e) for i, e in pairs})
