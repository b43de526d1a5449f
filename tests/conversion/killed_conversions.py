"""Run by a test: a conversion is killed before each of its calls that change files, and started again; the number of
kills goes to stdout."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))
from checkpoint_folders import file_bytes

from refold.conversion import convert

CALLS = ("fsync", "replace", "rename", "pwrite", "mkdir", "ftruncate", "unlink", "rmdir")


def killed_before(number: int, source: Path, out: Path) -> bool:
    """Convert in a process that is killed before so many calls; whether it was."""
    child = os.fork()
    if not child:
        left = [number]
        for name in CALLS:
            setattr(os, name, counted(getattr(os, name), left))
        convert(source, out, to="vllm", jobs=1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def counted(call: Callable[..., Any], left: list[int]) -> Callable[..., Any]:
    def counting(*arguments: Any, **settings: Any) -> Any:
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return call(*arguments, **settings)

    return counting


def main(source: Path, out: Path) -> int:
    out.mkdir()
    convert(source, out / "whole", to="vllm")
    wanted, kills = file_bytes(out / "whole"), 0
    while killed_before(kills, source, out / str(kills)):
        convert(source, out / str(kills), to="vllm", jobs=1)
        assert file_bytes(out / str(kills)) == wanted, kills
        kills += 1
    assert not [name for name in os.listdir(out) if name.startswith(".")]
    return kills


if __name__ == "__main__":
    sys.stdout.write(str(main(Path(sys.argv[1]), Path(sys.argv[2]))))
