"""Run every rule on random models of every layer kind of torch.nn, and count the promises that are broken.

    python benchmarks/random_models.py [number of models, 2000] [first seed, 0]

Each model is traced by torch.fx, captured by refold.trace, and exported by torch.export, where that works. A rule must
not raise; if it fires, the outputs must agree in float64, and undo must give everything back exactly. Writes
benchmarks/results/random_models.json: how many graphs and applications there were, how often each rule fired, which
layers were met, and every breach with the seed of its model.
"""

from __future__ import annotations

import copy
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, symbolic_trace

import refold
from refold.examples import Example
from refold.rewrite.registry import registered
from refold.testing.promises import Breach, check_promises
from refold.testing.random_layers import random_model

RESULTS = Path(__file__).parent / "results" / "random_models.json"
CAPTURES: dict[str, Callable[[Any, tuple[Any, ...]], GraphModule]] = {
    "torch.fx": lambda model, inputs: symbolic_trace(model),
    "refold.trace": lambda model, inputs: refold.trace(model, *inputs, dynamic=False),
    "torch.export": lambda model, inputs: torch.export.export(model, inputs).module(),  # type: ignore[dict-item]
}


def graphs(example: Example) -> Iterator[tuple[str, GraphModule | None, tuple[Any, ...]]]:
    """A model in every form in which it can be captured, with its inputs; None where it cannot."""
    model, inputs = example
    for name, capture in CAPTURES.items():
        own, given = copy.deepcopy(model), inputs
        if name != "torch.fx":  # what is captured may not be cast afterwards
            own, given = own.double(), tuple(value.double() for value in inputs)
        try:
            yield name, capture(own, given), given
        except Exception:  # torch or refold says that it cannot capture this model
            yield name, None, given


def main(models: int = 2000, first: int = 0) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rules = [cls() for cls in registered() if cls.__module__.startswith("refold.")]
    start = time.time()
    counts: Counter[str] = Counter({"raised": 0, "wrong": 0, "inexact": 0})
    fired: Counter[str] = Counter({type(rule).__name__: 0 for rule in rules})
    captured: Counter[str] = Counter()
    layers: Counter[str] = Counter()
    breaches: list[str] = []
    for seed in range(first, first + models):
        example = random_model(seed)
        layers.update({type(m).__name__ for m in example[0].modules() if type(m).__module__.startswith("torch.nn")})
        for how, gm, inputs in graphs(example):
            if gm is None:
                continue
            captured[how] += 1
            for rule in rules:
                found = check_promises(rule, gm, inputs)
                counts["applications"] += 1
                if isinstance(found, Breach):
                    counts[found.kind] += 1
                    breaches.append(f"seed {seed}, {how}: {found}")
                    print(breaches[-1][:400], flush=True)
                else:
                    fired[type(rule).__name__] += found.fired
    outcome = {
        "models": models,
        "first seed": first,
        "graphs": dict(captured),
        "applications": counts.pop("applications", 0),
        "broken promises": dict(counts),
        "fired": dict(fired),
        "kinds of layers": len(layers),
        "models with a layer": dict(layers.most_common()),
        "seconds": round(time.time() - start),
        "torch": torch.__version__,
        "breaches": breaches,
    }
    RESULTS.write_text(json.dumps(outcome, indent=2, ensure_ascii=False) + "\n")
    print(json.dumps({key: outcome[key] for key in ("graphs", "applications", "broken promises", "fired", "seconds")}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
