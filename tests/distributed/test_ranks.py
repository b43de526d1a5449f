"""Sharded models on several ranks do what one process does: gloo on this machine, one set of processes each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import checks_on_ranks
import pytest
from checks_on_ranks import ON_ANY_NUMBER, ON_FOUR


@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_models_do_what_one_process_does(ranks: int, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, checks_on_ranks.__file__, str(ranks), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-8000:]
    wanted = [check.__name__ for check in [*ON_ANY_NUMBER, *(ON_FOUR if ranks == 4 else ())]]
    assert [(tmp_path / f"passed.{rank}").read_text().split() for rank in range(ranks)] == [wanted] * ranks


def test_nothing_of_it_is_loaded_with_refold() -> None:
    code = "import sys, refold; sys.exit('torch.distributed.tensor' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
