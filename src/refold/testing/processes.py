"""Save here, load and reverse in a new process: what travels there, and what that process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from refold import undo
from refold.testing.exactness import Portrait
from refold.transformation import ReversibleTransformation, Transformation


@dataclass
class Parcel:
    """A transformation and a module that it rewrote."""

    transformation: Transformation
    module: GraphModule


def undo_in_new_process(parcels: Sequence[Parcel]) -> list[dict[str, Any]]:
    """Plain portraits of the modules as reversed in a new process under another hash seed."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    paths = os.pathsep.join([os.getcwd(), *filter(None, sys.path)])  # where the classes of the models are defined
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(list(parcels), Path(folder, "parcels.pt"))
        command = [sys.executable, "-c", "import refold.testing.processes as p; p.main()", folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the new process failed: {done.stderr.strip()}")
        found: list[dict[str, Any]] = json.loads(Path(folder, "portraits.json").read_text())
    return found


def main() -> None:
    """What the new process does: reverse each module, by its transformation if that can."""
    folder = Path(sys.argv[1])
    portraits = []
    for parcel in torch.load(folder / "parcels.pt", weights_only=False):
        t, gm = parcel.transformation, parcel.module
        back = t(gm, reverse=True) if isinstance(t, ReversibleTransformation) else undo(gm, None)
        portraits.append(Portrait.of(back).plain())
    (folder / "portraits.json").write_text(json.dumps(portraits))
