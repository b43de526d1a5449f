"""What one rule is worth: each way to run a model with the rule and without it, interleaved in one run."""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from accuracy import reference, relative_error
from contenders import COMPILE, compiled, keep_eager
from models import RESULTS, machine
from suite import Inputs, call
from torch import nn

import refold
from refold.measurement.timing import Comparison, measure_many, rounds_needed
from refold.rewrite.rule import Rewrite

Row = tuple[str, Callable[[], tuple[nn.Module, Inputs]]]
WAYS = {"plain": keep_eager, COMPILE: compiled(), f"{COMPILE} freezing": compiled(freezing=True)}


def main(rule: Rewrite, file: str, rows: Iterable[Row]) -> None:
    """Run the rows of a script, write its results, and print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", nargs="*", help="only these")
    parser.add_argument("--time-budget", type=float, default=30.0, help="seconds of measuring a row")
    parser.add_argument("--out", type=Path, help="the file to write")
    options = parser.parse_args()
    path = options.out or RESULTS / f"{file}_{'gpu' if options.device == 'cuda' else 'cpu'}.json"
    done = json.loads(path.read_text())["rows"] if path.exists() else {}
    for name, make in rows:
        if options.rows and name not in options.rows:
            continue
        done[name] = run(rule, *make(), options.device, options.time_budget)
        path.write_text(
            json.dumps({"machine": machine(options.device), "rule": repr(rule), "rows": done}, indent=1) + "\n"
        )
        for way, found in done[name]["gain"].items():
            low, high = found["interval"]
            print(f"{name}: {way} {found['ratio']:.2f}× [{low:.2f}, {high:.2f}] over {found['rival']}", flush=True)
        torch.compiler.reset()


@torch.no_grad()
def run(rule: Rewrite, model: nn.Module, inputs: Inputs, device: str, budget: float) -> dict[str, Any]:
    """One model: every way with the rule against the same way without it, and the fastest against the fastest."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = model.eval().requires_grad_(False).to(device, dtype)
    inputs = {k: v.to(device, dtype if v.is_floating_point() else v.dtype) for k, v in inputs.items()}
    graph = refold.trace(copy.deepcopy(model), **inputs)
    without = copy.deepcopy(graph)
    rule(graph)
    sites = [rewritten.what for rewritten in refold.result(graph).rewritten]
    assert sites, f"{rule!r} rewrote nothing"
    made = {"eager": model}
    made |= {f"{way}, without": build(without, inputs) for way, build in WAYS.items()}
    made |= {f"{way}, with": build(graph, inputs) for way, build in WAYS.items()}
    expected = reference(model, inputs)
    errors = {name: relative_error(call(contender, inputs), expected) for name, contender in made.items()}
    compared = measure_many(
        made, inputs, time_budget=budget, at_least=rounds_needed(0.95), baseline="eager", keep=made, memory=False
    )
    print(compared)
    return {
        "dtype": str(dtype),
        "threads": compared.threads,
        "sites": sites,
        "relative_error": errors,
        "contenders": {name: timing.to_dict() for name, timing in compared.timings.items()},
        "gain": {way: _gain(compared, f"{way}, without", f"{way}, with") for way in WAYS} | {"best": _best(compared)},
    }


def _best(compared: Comparison) -> dict[str, Any]:
    ranked = [timing.name for timing in compared.ranked]
    rival, mine = (next(n for n in ranked if n.endswith(", with") is ours) for ours in (False, True))
    return _gain(compared, rival, mine)


def _gain(compared: Comparison, rival: str, mine: str) -> dict[str, Any]:
    against = compared.between(rival, mine)
    return {"rival": rival, "mine": mine, "ratio": against.ratio, "interval": against.interval}
