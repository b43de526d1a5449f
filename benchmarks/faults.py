"""Make every executed line of every rewrite fail, on the way there and back, with an exception and with Ctrl-C.

    python benchmarks/faults.py [--every-time] [names of rewrites]

Each line of the source fails when it is executed for the first and for the last time; with --every-time, each time.
Writes benchmarks/results/faults.json rewrite by rewrite: how many lines were tried, and which left a trace. What is
in it already for the same source is not run again, and several processes may write to it at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import refold.transformations
from refold.rewrite import Rewrite, registered
from refold.testing.faults import Fault, attempts
from refold.testing.laws import graph_of

RESULTS = Path(__file__).parent / "results" / "faults.json"
MODES = {True: "each line, every time", False: "each line, first and last time"}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    every_time = "--every-time" in sys.argv
    wanted = {name for name in sys.argv[1:] if not name.startswith("--")}
    for cls in registered():
        if not cls.__module__.startswith("refold.") or (wanted and cls.__name__ not in wanted):
            continue
        source = digest(cls)
        known = read().get(MODES[every_time], {}).get(cls.__name__)
        if known is None or known["source"] != source:
            known = write(MODES[every_time], cls.__name__, {**try_all(cls(), every_time), "source": source})
        print(cls.__name__, known, flush=True)


def digest(cls: type[Rewrite]) -> str:
    """The source of the transformation and of all that a call of it may execute."""
    home = Path(refold.__file__).parent
    parts = [
        sys.modules[cls.__module__].__file__,
        *sorted(home.glob("*.py")),
        *sorted((home / "operations").glob("*.py")),
    ]
    return hashlib.sha256(b"".join(Path(str(part)).read_bytes() for part in parts)).hexdigest()[:16]


def try_all(rewrite: Rewrite, every_time: bool) -> dict[str, Any]:
    """Every line, on the rewrite's first example; both kinds of fault."""
    model, _ = next(iter(rewrite.examples()))
    start = time.process_time()
    tried, lines, found = 0, set(), []
    for attempt in attempts(rewrite, graph_of(model)):
        lines |= set(attempt.lines)
        places = attempt.places(every_time=every_time)
        for error in (Fault, KeyboardInterrupt):
            tried += len(places)
            found += list(attempt.check(places, error))
    seconds = round(time.process_time() - start, 1)
    return {"faults": tried, "lines of the source": len(lines), "damaged": found, "seconds": seconds}


def read() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write(mode: str, name: str, outcome: dict[str, Any]) -> dict[str, Any]:
    """Add one outcome to what is there by now."""
    RESULTS.parent.mkdir(exist_ok=True)
    with (Path(tempfile.gettempdir()) / "refold_faults.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        report = read()
        report.setdefault(mode, {})[name] = outcome
        RESULTS.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return outcome


if __name__ == "__main__":
    main()
