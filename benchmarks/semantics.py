"""What executors on a CPU give on values that engines are known to treat otherwise: NaN, wrong indices, large integers;
and what the guards of their inputs cost in each call.

python benchmarks/semantics.py --executors onnxruntime openvino compile-freezing
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from executors.test_semantics import outcome, why_different
from support.value_probes import PROBES, Function

from refold.executors import PreparationFailed, executor_named
from refold.executors.guards import Bounds, OpenMask
from refold.optimization.report_building import machine

GUARDS: dict[str, tuple[Bounds | OpenMask, torch.Tensor]] = {
    "token numbers, 8 × 128": (Bounds(0, 0, 30_000), torch.randint(30_000, (8, 128))),
    "a mask, 8 × 128": (OpenMask(0, "some"), torch.ones(8, 128, dtype=torch.int64)),
    "an image, 224 × 224": (Bounds(0, -1e4, 1e4), torch.randn(1, 3, 224, 224)),
    "32 images, 224 × 224": (Bounds(0, -1e4, 1e4), torch.randn(32, 3, 224, 224)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executors", nargs="+", default=["onnxruntime", "openvino"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "semantics.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: _probed(name) for name in options.executors}
    place = machine()
    guards = {what: _microseconds(condition, tensor) for what, (condition, tensor) in GUARDS.items()}
    kept = {
        "machine": place.description,
        "versions": dict(place.versions),
        "probes": len(PROBES),
        "executors": found,
        "guards": guards,
    }
    options.out.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    for name, result in found.items():
        wrong, refused = len(result["wrong"]), len(result["refused"])
        print(f"{name}: {len(PROBES)} probes, {wrong} wrong, {refused} left to torch, {result['seconds']} s")
    for what, cost in guards.items():
        print(f"guard of {what}: {cost} µs")


def _microseconds(condition: Bounds | OpenMask, tensor: torch.Tensor) -> float:
    """The median of a thousand checks."""
    seconds = []
    for _ in range(1000):
        start = time.perf_counter()
        condition.allow(tensor)
        seconds.append(time.perf_counter() - start)
    return round(statistics.median(seconds) * 1e6, 1)


def _probed(name: str) -> dict:
    wrong, refused, start = {}, {}, time.perf_counter()
    for probe in PROBES:
        model = Function(probe.function).eval()
        try:
            run = executor_named(name).prepare(model, probe.example, {})
        except PreparationFailed as failure:
            refused[probe.name] = str(failure)
            continue
        different = why_different(outcome(model, probe.values), outcome(run, probe.values))
        if different is not None:
            wrong[probe.name] = different
    return {"wrong": wrong, "refused": refused, "seconds": round(time.perf_counter() - start)}


if __name__ == "__main__":
    main()
