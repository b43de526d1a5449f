"""Make every executed line of every rewrite fail, on the way there and back, with an exception and with Ctrl-C; and
the lines of whole jobs (optimize, refresh, trace, save, load).

    python benchmarks/faults.py [--every-time] [--lines 300] [names of rewrites and jobs]

Each line of the source fails when it is executed for the first and for the last time; with --every-time, each time. In
jobs, each line (or so many of them, drawn by seed) fails when it is executed for the first time, and the model and
what surrounds it is looked at.
Writes benchmarks/results/faults.json rewrite by rewrite: how many lines were tried, and which left a trace. What is
in it already for the same source is not run again, and several processes may write to it at once.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import refold
import refold.transformations
from refold.rewrite.registry import registered
from refold.testing.faults import Attempts, Fault, Line, attempts
from refold.testing.laws import graph_of
from refold.testing.model_faults import check_job_faults, every_line

RESULTS = Path(__file__).parent / "results" / "faults.json"
WHEN = {True: "every time", False: "the first and the last time"}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of rewrites and jobs; all when left out")
    parser.add_argument("--every-time", action="store_true")
    parser.add_argument("--lines", type=int, help="of a job, drawn; all when left out")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    every_time, wanted = options.every_time, set(options.names)
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
    with tempfile.TemporaryDirectory() as folder:
        for name, (model, *job) in jobs(Path(folder)).items():
            if not wanted or name in wanted:
                print(name, write(name, try_job(model, *job, options)), flush=True)


DIVISOR = [4.0]
"""What the model divides by, which no call of an optimized model looks at."""


class Attention(nn.Module):
    """A model of which weights are merged and folded."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.last = (nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = (self.query(x) @ self.key(x).T).softmax(-1) @ self.value(x)
        return self.norm(self.last(x)) + mixed / DIVISOR[0]


Job = tuple[nn.Module, Callable[[], Any], Callable[[Any], object], Callable[[], object]]


def jobs(folder: Path) -> dict[str, Job]:
    """By name: a model, what to do with it, what takes that back, and what must be done before each time."""
    model, x = Attention().eval(), torch.randn(3, 8)
    gm = refold.MergeLinears()(refold.trace(Attention().eval(), x))
    refold.save(gm, folder / "whole")
    other = Attention().eval()
    fast: Any = refold.optimize(other, (x,), backend="plain", progress=False, cache=False)
    nothing: Callable[[Any], object] = lambda _done: None  # noqa: E731
    at_once: Callable[[], object] = lambda: None  # noqa: E731
    return {
        "optimize": (
            model,
            lambda: refold.optimize(model, (x,), backend="plain", progress=False, cache=False),
            lambda fast: fast.restore(),
            at_once,
        ),
        "refresh": (other, fast.refresh, nothing, lambda: _changed(fast)),
        "trace": (model, lambda: refold.trace(model, x), nothing, at_once),
        "save": (gm, lambda: refold.save(gm, folder / "again"), nothing, at_once),
        "load": (model, lambda: refold.load(folder / "whole", model), nothing, at_once),
    }


def _changed(fast: Any) -> None:
    """Let the code of a model change that is prepared for what it was."""
    DIVISOR[0] = 4.0
    fast.refresh()
    DIVISOR[0] = 2.0


def try_job(
    model: nn.Module,
    job: Callable[[], Any],
    undo: Callable[[Any], object],
    ready: Callable[[], object],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """The first execution of every line of a job, or of some; both kinds of fault."""
    draw = random.Random(options.seed)
    start, tried, found, lines = time.process_time(), 0, [], 0

    def choose(executed: list[Line]) -> list[int]:
        nonlocal tried, lines
        indices = every_line(executed)
        if options.lines is not None:
            indices = sorted(draw.sample(indices, min(options.lines, len(indices))))
        tried, lines = tried + len(indices), len(set(executed))
        return indices

    for error in (Fault, KeyboardInterrupt):
        found += list(check_job_faults(job, model, choose, error, undo, ready))
    seconds = round(time.process_time() - start, 1)
    which = "the first time" if options.lines is None else f"the first time, {options.lines} of them drawn"
    about = {"lines tried": tried, "different lines": lines, "each line": which, "seconds": seconds}
    return {**about, "damaged": found, "versions": {"refold": refold.__version__, "torch": torch.__version__}}


def digest(calls: list[Attempts]) -> str:
    """The source of all files that the calls execute lines of."""
    files = sorted({file for call in calls for file, _ in call.lines})
    return hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()[:16]


def try_all(calls: list[Attempts], every_time: bool) -> dict[str, Any]:
    """Every line of applying and reversing; both kinds of fault."""
    start = time.process_time()
    tried, found = 0, []
    for call in calls:
        indices = call.indices(every_time=every_time)
        for error in (Fault, KeyboardInterrupt):
            tried += len(indices)
            found += list(call.check(indices, error))
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
