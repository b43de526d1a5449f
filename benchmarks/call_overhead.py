"""What a call of an optimized model adds to the time that ONNX Runtime computes: looking at the model first, or beside.

python benchmarks/call_overhead.py --case "mobilenet-v2 b1" --rounds 250
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from suite import cases

import refold
from refold.optimizing.optimized import OptimizedModule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="mobilenet-v2 b1")
    parser.add_argument("--rounds", type=int, default=250)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, inputs = next(iter(cases("cpu", [options.case]))).build()
    fast = refold.optimize(model, inputs, backend="onnxruntime", progress=False)
    beside = fast.variants[0]
    before = copy.copy(beside)
    before.looks_first = True
    engine, inside = beside.run, []

    def timed(*args: Any) -> Any:
        started = time.perf_counter()
        arrays = compute(*args)
        inside.append(time.perf_counter() - started)
        return arrays

    compute, engine.compute_arrays = engine.compute_arrays, timed
    ways: dict[str, Callable[..., Any]] = {
        "the engine alone": lambda **given: engine.compute_arrays(
            engine.made, {name: list(given.values())[place].numpy() for place, name in engine.used}, None
        ),
        "looks before": OptimizedModule(fast.original, before),
        f"looks beside ({'no core is left' if beside.looks_first else 'yes'})": fast,
    }
    added: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for _ in range(options.rounds):
            for name in random.sample(list(ways), len(ways)):
                inside.clear()
                started = time.perf_counter()
                ways[name](**inputs)
                added[name].append(time.perf_counter() - started - sum(inside))
    print(f"{options.case}: {beside.freshness.watches} weights looked at; added to the engine's time, median:")
    for name, seconds in added.items():
        print(f"  {name}: {statistics.median(seconds) * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
