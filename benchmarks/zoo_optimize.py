"""Every model family of the installed transformers through `refold.optimize`, compared with the model itself.

    python benchmarks/zoo_optimize.py                 # what is not in benchmarks/results/zoo_optimize.json yet
    python benchmarks/zoo_optimize.py --only bert vit # these families again

Tiny models with random weights, as in zoo.py; caches are left on, as they are by default. All rewrites that verify are
kept (tiny models say nothing about speed) and the plain graph runs. Compared are: the result, its class, its keys and
every tensor in it, caches included; a call with one more row, which must run the original; and the model after
`.restore()`, bit for bit.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import torch
import zoo
import zoo_models
from torch import nn

import refold
from refold.fingerprint import same_bits
from refold.nested import named_leaves
from refold.optimization import choice, steps
from refold.optimization.budget import EFFORTS

Inputs = dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=60, help="seconds of processor time for a family")
    options = parser.parse_args()
    steps._measured = lambda *_: None  # type: ignore[assignment,misc]
    choice._MEASURE_SECONDS = dict.fromkeys(EFFORTS, 0.3)
    zoo.warm_up()
    results = zoo.read(zoo.OPTIMIZED)
    wanted = options.only or [name for name in zoo.families() if name not in results]
    random.Random(0).shuffle(wanted)
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = {pool.submit(zoo.run_apart, n, zoo_models.build, options.timeout, optimize_one): n for n in wanted}
        for done in as_completed(waiting):
            results[waiting[done]] = done.result()
            zoo.OPTIMIZED.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
            print(waiting[done], json.dumps(done.result())[:300], flush=True)
    print(summary(results))


def optimize_one(name: str, build: zoo.Build, tell: zoo.Tell) -> None:
    """All that is asked of one family, told one by one, so that a killed process leaves what it had."""
    torch.manual_seed(0)
    try:
        model, inputs, _ = build(name)
    except Exception as error:
        tell({"eager": "no", "why": str(error)[-300:]})
        return
    leave_caches_on(model)
    untouched = copy.deepcopy(model)
    expected = run(untouched, inputs)
    result: dict[str, Any] = {"eager": "yes"}
    tell(result)
    started = time.perf_counter()
    try:
        optimized = refold.optimize(model, cloned(inputs), backend="plain", progress=False, cache=False)
    except refold.RefoldError as error:
        tell(result | {"refused": str(error)[:300]})
        return
    result |= {"seconds": round(time.perf_counter() - started, 1), "notes": list(optimized.report.notes)[:2]}
    result |= {"kept": sum(step.status == "kept" for step in optimized.report.steps)}
    result |= {"wrong": [step.name for step in optimized.report.steps if step.note == "It did not verify."]}
    result |= {"captured": optimized.graph_module is not None}
    result |= {"error": difference(run(optimized, inputs), expected)}
    tell(result)
    more = {key: torch.cat([value, value[:1]]) if value.dim() else value for key, value in inputs.items()}
    try:
        wanted = run(untouched, more)
    except Exception:
        wanted = None  # the family takes no other batch
    result["other batch"] = None if wanted is None else difference(run(optimized, more), wanted)
    restored = optimized.restore()
    same = list(restored.state_dict()) == list(untouched.state_dict())
    same = same and all(map(same_bits, restored.state_dict().values(), untouched.state_dict().values()))
    result["restored"] = restored is model and same and difference(run(restored, inputs), expected) == 0
    tell(result)


def leave_caches_on(model: nn.Module) -> None:
    """As a configuration has it that nobody touched: on for the decoder."""
    config = getattr(model, "config", None)
    for part in (config, config.get_text_config(decoder=True)) if config is not None else ():
        if hasattr(part, "use_cache"):
            part.use_cache = True


def cloned(inputs: Inputs) -> Inputs:
    return {key: value.clone() for key, value in inputs.items()}


def run(model: nn.Module, inputs: Inputs) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        return model(**cloned(inputs))


def difference(got: Any, expected: Any) -> float | str:
    """The largest relative error of a tensor, or in words what else differs."""
    if type(got) is not type(expected):
        return f"a {type(got).__name__} instead of a {type(expected).__name__}"
    mine, its = list(named_leaves(got)), list(named_leaves(expected))
    if [name for name, _ in mine] != [name for name, _ in its]:
        return "other entries"
    worst = 0.0
    for (name, a), (_, b) in zip(mine, its, strict=True):
        if not isinstance(b, torch.Tensor):
            continue
        if not isinstance(a, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} has another shape or dtype"
        if not b.is_floating_point():
            if not torch.equal(a, b):
                return f"{name} differs"
            continue
        finite = b.isfinite()
        if not torch.equal(finite, a.isfinite()):
            return f"{name} is not finite elsewhere"
        size = float(b[finite].double().norm())
        worst = max(worst, float((a[finite].double() - b[finite].double()).norm()) / size if size else 0.0)
    return worst


def summary(results: dict[str, Any]) -> str:
    ran = {name: row for name, row in results.items() if row["eager"] == "yes" and "error" in row}
    captured = {name: row for name, row in ran.items() if row["captured"]}
    odd = {name: row for name, row in ran.items() if not good(row)}
    lines = [f"{len(ran)} families optimized, {len(captured)} of them captured whole, {len(odd)} with a fault"]
    lines += [f"  {name}: {row}" for name, row in odd.items()]
    return "\n".join(lines)


def good(row: dict[str, Any]) -> bool:
    error, other = row["error"], row.get("other batch")
    small = isinstance(error, float | int) and error < 1e-5
    return small and not row["wrong"] and other in (None, 0) and row.get("restored") is True


if __name__ == "__main__":
    main()
