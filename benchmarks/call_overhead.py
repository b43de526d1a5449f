"""What a call of an optimized model adds to a call of ONNX Runtime alone, and what it would add in other ways.

python benchmarks/call_overhead.py --case "mobilenet-v2 b1" --rounds 500
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
    parser.add_argument("--rounds", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, inputs = next(iter(cases("cpu", [options.case]))).build()
    ways = ways_to_call(refold.optimize(model, inputs, backend="onnxruntime", progress=False))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for _ in range(options.rounds):
            for name in random.sample(list(ways), len(ways)):
                started = time.perf_counter()
                ways[name](**inputs)
                seconds[name].append(time.perf_counter() - started)
    alone = seconds.pop("the engine alone")
    print(f"{options.case}: the engine alone takes {statistics.median(alone) * 1e3:.3f} ms; added to it, median:")
    for name, times in seconds.items():
        added = [mine - its for mine, its in zip(times, alone, strict=True)]
        print(f"  {name}: {statistics.median(added) * 1e3:+.3f} ms")


def ways_to_call(fast: OptimizedModule) -> dict[str, Callable[..., Any]]:
    variant = fast.variants[0]
    engine = variant.run
    before, after = copy.copy(variant), copy.copy(variant)
    before.looks_first = True
    after.run = copy.copy(engine)
    after.run.ready = None

    def alone(**given: torch.Tensor) -> Any:
        tensors = list(given.values())
        return engine.compute_arrays(engine.made, {name: tensors[place].numpy() for place, name in engine.used}, None)

    ways: dict[str, Callable[..., Any]] = {
        "the engine alone": alone,
        "looks before": OptimizedModule(fast.original, before),
    }
    if not variant.looks_first:
        ways["looks beside, outputs made afterwards"] = OptimizedModule(fast.original, after)
        ways["looks beside, outputs ready (as it is)"] = fast
    return ways


if __name__ == "__main__":
    main()
