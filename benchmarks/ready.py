"""Seconds until an optimized model is ready: with nothing kept, with what earlier processes decided, and quick.

    python benchmarks/ready.py --device cpu --cases "bert-base b1" "resnet50 b1"

Every number is from a process of its own and counts `refold.optimize` alone, not the import and not the making of the
model. `cold` begins with an empty cache; `again` are the processes after it that raced what was left open; `warm` is
the one after which nothing was left to do; `other weights` is warm with the same model of another seed; `folder` loads
what `refold.save` wrote. One case is in the file after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
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
    parser.add_argument("--only", nargs="+", default=["quick", "cold", "warm", "other weights", "folder"])
    options = parser.parse_args()
    from models import load

    path = RESULTS / f"ready_{'gpu' if options.device == 'cuda' else 'cpu'}.json"
    data = load(path, options.device)
    for case in options.cases:
        data["cases"][case] = row = measured(case, options)
        path.write_text(json.dumps(data, indent=1) + "\n")
        print(f"{case}: " + ", ".join(f"{name} {told(value)}" for name, value in row.items()))


def told(value: Any) -> str:
    return ", ".join(map(told, value)) if isinstance(value, list) else f"{value['seconds']} s ({value['runs']})"


def measured(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """One case, each number in a process of its own."""
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

        row: dict[str, Any] = {}
        if "quick" in options.only:
            row["quick"] = ready(effort="quick", cache=False)
        row["cold"] = ready()
        row["again"] = []
        for _ in range(_MOST_AGAIN):
            found = ready(save=True)
            if not found["raced"]:
                row["warm"] = found
                break
            row["again"].append(found)
        if "other weights" in options.only:
            row["other weights"] = ready(seed=1)
        if "folder" in options.only:
            row["folder"] = ready(load=True)
        return row


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
    start = time.perf_counter()
    if asked.get("load"):
        fast = refold.load(folder, model)
    else:
        settings = {"effort": asked.get("effort", "default"), "cache": asked.get("cache", True)}
        fast = refold.optimize(model, inputs, **settings, progress=False)
    seconds = time.perf_counter() - start
    if asked.get("save"):
        refold.save(fast, folder)
    notes = [note for note in fast.report.notes if note.startswith(("As decided", "What was"))]
    raced = any("raced again" in note for note in notes)
    load = os.getloadavg()[0]
    runs = fast.prepared.at_example.executor
    return {"seconds": round(seconds, 1), "runs": runs, "raced": raced, "load": round(load, 1), "notes": notes}


if __name__ == "__main__":
    main()
