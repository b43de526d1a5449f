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

import refold.transformations  # noqa: F401 (registers the rewrites)
from refold.rewrite import registered
from refold.testing.faults import Attempts, Fault, attempts
from refold.testing.laws import graph_of

RESULTS = Path(__file__).parent / "results" / "faults.json"
WHEN = {True: "every time", False: "the first and the last time"}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    every_time = "--every-time" in sys.argv
    wanted = {name for name in sys.argv[1:] if not name.startswith("--")}
    for cls in registered():
        if not cls.__module__.startswith("refold.") or (wanted and cls.__name__ not in wanted):
            continue
        model, _ = next(iter(cls.examples()))
        calls = list(attempts(cls(), graph_of(model)))
        source = digest(calls)
        known = read().get(cls.__name__)
        if known is None or known["source"] != source or known["each line"] not in ("every time", WHEN[every_time]):
            known = write(cls.__name__, {**try_all(calls, every_time), "source": source})
        print(cls.__name__, known, flush=True)


def digest(calls: list[Attempts]) -> str:
    """The source of all files that the calls execute lines of."""
    files = sorted({file for call in calls for file, _ in call.lines})
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:16]


def try_all(calls: list[Attempts], every_time: bool) -> dict[str, Any]:
    """Every line of applying and reversing; both kinds of fault."""
    start = time.process_time()
    tried, found = 0, []
    for call in calls:
        places = call.places(every_time=every_time)
        for error in (Fault, KeyboardInterrupt):
            tried += len(places)
            found += list(call.check(places, error))
    lines = len({line for call in calls for line in call.lines})
    seconds = round(time.process_time() - start, 1)
    about = {"lines tried": tried, "different lines": lines, "each line": WHEN[every_time], "seconds": seconds}
    return {**about, "damaged": found}


def read() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write(name: str, outcome: dict[str, Any]) -> dict[str, Any]:
    """Add one outcome to what is there by now."""
    RESULTS.parent.mkdir(exist_ok=True)
    with (Path(tempfile.gettempdir()) / "refold_faults.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        report = read()
        report[name] = outcome
        RESULTS.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return outcome


if __name__ == "__main__":
    main()
