"""Seconds until an optimized model is ready: with nothing kept, with what earlier processes decided, and quick.

    python benchmarks/ready.py --device cpu --cases "bert-base b1" "resnet50 b1"

Every number is from a process of its own and counts `refold.optimize` alone, not the import and not the making of the
model. `cold` begins with an empty cache; `again` are the processes after it that raced what was left open; `warm` is
the one after which nothing was left to do; `other weights` is warm with the same model of another seed; `folder` loads
what `refold.save` wrote. `seconds` pass on the wall; where other processes compute as well (`load`), the seconds that
the processor worked, of all threads together, say more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

RESULTS = Path(__file__).parent / "results"
_MOST_AGAIN = 4
_HERE = "--here"


def main() -> None:
    if _HERE in sys.argv:
        print(json.dumps(measured_here(json.loads(sys.argv[sys.argv.index(_HERE) + 1]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", nargs="+", default=["bert-base b1", "resnet50 b1"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", nargs="+", default=["quick", "folder", "other weights"])
    options = parser.parse_args()
    from models import load

    path = RESULTS / f"ready_{'gpu' if options.device == 'cuda' else 'cpu'}.json"
    data = load(path, options.device)
    for case in options.cases:
        row = data["cases"][case] = {}
        for name, found in measured(case, options):
            row[name] = [*row.get(name, []), found] if name == "again" else found
            path.write_text(json.dumps(data, indent=1) + "\n")
            times = f"{found['seconds']} s, {found['processor_seconds']} s of the processor"
            print(f"{case}, {name}: {times}, runs by {found['runs']} (load {found['load']})", flush=True)


def measured(case: str, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """What was measured of one case, each in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="refold-ready-") as place:

        def ready(**asked: Any) -> dict[str, Any]:
            given = {"case": case, "device": options.device, "threads": options.threads, "place": place}
            process = [sys.executable, __file__, _HERE, json.dumps(given | asked)]
            settings = os.environ | {"REFOLD_CACHE": f"{place}/cache"}
            done = subprocess.run(process, env=settings, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr[-2000:])
            found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return found

        yield "cold", ready(save=True)
        for _ in range(_MOST_AGAIN):
            found = ready(save=True)
            yield "again" if found["raced"] else "warm", found
            if not found["raced"]:
                break
        asked = {
            "quick": {"effort": "quick", "cache": False},
            "other weights": {"seed": 1},
            "folder": {"load": True},
        }
        for name in options.only:
            yield name, ready(**asked[name])


def measured_here(asked: dict[str, Any]) -> dict[str, Any]:
    """The seconds of one preparation in this process, and what came of it."""
    import torch
    from suite import cases

    import refold

    if asked["threads"]:
        torch.set_num_threads(asked["threads"])
    torch.manual_seed(asked.get("seed", 0))
    case = next(iter(cases(asked["device"], [asked["case"]])))
    model, inputs = case.build()
    if asked.get("seed"):
        with torch.no_grad():
            next(model.parameters()).mul_(1.001)  # whatever the seed does: these are other weights
    folder = f"{asked['place']}/folder"
    start, worked = time.perf_counter(), time.process_time()
    if asked.get("load"):
        fast = refold.load(folder, model)
    else:
        settings = {"effort": asked.get("effort", "default"), "cache": asked.get("cache", True)}
        fast = refold.optimize(model, inputs, **settings, progress=False)
    seconds, worked = time.perf_counter() - start, time.process_time() - worked
    if asked.get("save"):
        refold.save(fast, folder)
    notes = [note for note in fast.report.notes if note.startswith(("As decided", "What was"))]
    raced = any("raced again" in note for note in notes)
    load = os.getloadavg()[0]
    runs = fast.prepared.at_example.executor
    times = {"seconds": round(seconds, 1), "processor_seconds": round(worked, 1), "load": round(load, 1)}
    return times | {"runs": runs, "raced": raced, "notes": notes}


if __name__ == "__main__":
    main()
