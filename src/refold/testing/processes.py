"""Save here, load and reverse in a new process: what is handed over, and what that process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from refold import undo
from refold.rewrite.transformation import ReversibleTransformation, Transformation
from refold.testing.portrait import Portrait


def reverse(t: Transformation, gm: GraphModule) -> GraphModule:
    """Reverse a module in the transformation's own way if it has one, else by the history."""
    return t(gm, reverse=True) if isinstance(t, ReversibleTransformation) else undo(gm, None)


def reverse_in_new_process(cases: Sequence[tuple[Transformation, GraphModule]]) -> list[dict[str, Any]]:
    """Plain portraits of rewritten modules, each reversed in a new process under another hash seed."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    paths = os.pathsep.join([os.getcwd(), *filter(None, sys.path)])  # where the classes of the models are defined
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(list(cases), Path(folder, "cases.pt"))
        command = [sys.executable, "-c", "import refold.testing.processes as p; p.main()", folder]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the new process failed: {done.stderr.strip()}")
        found: list[dict[str, Any]] = json.loads(Path(folder, "portraits.json").read_text())
    return found


def main() -> None:
    """What the new process does: reverse the module of each case and write down how it is then."""
    folder = Path(sys.argv[1])
    cases = torch.load(folder / "cases.pt", weights_only=False)
    portraits = [Portrait.of(reverse(t, gm)).plain() for t, gm in cases]
    (folder / "portraits.json").write_text(json.dumps(portraits))
