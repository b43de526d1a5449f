"""What a call of an optimized model adds to a call of ONNX Runtime alone, and how much of it is the check of the model.

python benchmarks/call_overhead.py --case "mobilenet-v2 b1" --rounds 500
"""

from __future__ import annotations

import argparse
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
from refold.executors.guards import Guarded
from refold.optimization.optimized_module import OptimizedModule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="mobilenet-v2 b1")
    parser.add_argument("--rounds", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, inputs = next(iter(cases("cpu", [options.case]))).build()
    fast = refold.optimize(model, inputs, backend="onnxruntime", progress=False, cache=False)
    ways = ways_to_call(fast)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    checks: list[float] = []
    with torch.no_grad():
        for _ in range(options.rounds):
            for name in random.sample(list(ways), len(ways)):
                seconds[name].append(_time(lambda way=ways[name]: way(**inputs)))
            ways["the engine alone"](**inputs)
            checks.append(_time(fast.prepared.at_example.watch.why_changed))
    alone = seconds.pop("the engine alone")
    print(f"{options.case}: the engine alone takes {statistics.median(alone) * 1e3:.3f} ms; added to it, median:")
    for name, times in seconds.items():
        added = [mine - its for mine, its in zip(times, alone, strict=True)]
        print(f"  {name}: {statistics.median(added) * 1e3:+.3f} ms")
    print(f"The check of the model alone, after a call of the engine: {statistics.median(checks) * 1e3:.3f} ms")


def ways_to_call(fast: OptimizedModule) -> dict[str, Callable[..., Any]]:
    variant = fast.prepared.at_example
    guarded: Any = variant.run
    engine = guarded.run if isinstance(guarded, Guarded) else guarded

    def alone(**given: torch.Tensor) -> Any:
        tensors = list(given.values())
        return engine.compute_arrays(engine.made, {name: tensors[place].numpy() for place, name in engine.used}, None)

    def unchecked(**given: torch.Tensor) -> Any:
        return guarded.run_checked(variant.spec.tensors((), given), (), given)

    return {"the engine alone": alone, "without the check of the model": unchecked, "as it is": fast}


def _time(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
