"""Run every contender on every model of the suite, interleaved in one process, and write one JSON file a device.

    python benchmarks/models.py --device cpu --cases "bert-base b1" resnet50 --budget-s 600

The file is written after each case, and cases that are in it already are left alone (unless `--again`).
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import math
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from accuracy import reference, relative_error
from contenders import COMPILE, build, contenders
from suite import Case, Inputs, call, cases

from refold.measurement.timing import Comparison, measure_many, rounds_needed

RESULTS = Path(__file__).parent / "results"
ENGINES = ("onnxruntime", "openvino")
PACKAGES = ("torch", "transformers", "onnxruntime", "openvino", "triton", "refold")


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    torch._dynamo.config.recompile_limit = 64  # contenders share the code objects of one model
    path = options.out or RESULTS / f"{'gpu' if options.device == 'cuda' else 'cpu'}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = load(path, options.device)
    started = time.monotonic()
    for case in cases(options.device, options.cases):
        if case.name in data["cases"] and not options.again:
            print(f"{case.name}: in {path.name} already")
            continue
        if options.budget_s and time.monotonic() - started > options.budget_s:
            print(f"{case.name}: out of time, run again to go on")
            break
        data["cases"][case.name] = run(case, options) | left_out_this_time(data["cases"].get(case.name), options)
        path.write_text(json.dumps(data, indent=1) + "\n")
        torch.compiler.reset()
        gc.collect()
    print(summary(data))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", nargs="*", help="models ('resnet50') or cases ('resnet50 b1'); all when left out")
    parser.add_argument("--contenders", nargs="*", help="only these; eager is always among them")
    parser.add_argument("--budget-s", type=float, help="start no further case after this many seconds")
    parser.add_argument("--time-budget", type=float, default=60.0, help="seconds of measuring a case")
    parser.add_argument("--threads", type=int, help="CPU threads, for every contender")
    parser.add_argument("--out", type=Path, help="the file to write, instead of benchmarks/results/{cpu,gpu}.json")
    parser.add_argument("--again", action="store_true", help="run cases that the file has already")
    return parser.parse_args()


def load(path: Path, device: str) -> dict[str, Any]:
    cases = json.loads(path.read_text())["cases"] if path.exists() else {}
    return {"machine": machine(device), "cases": cases}


def machine(device: str) -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": versions,
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def run(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Build all contenders of a case, measure them in turn, and set each one's error beside that of eager."""
    model, inputs = case.build()
    expected = reference(model, inputs)
    made, failed, build_s = {}, {}, {}
    for name, builder in contenders(case.device).items():
        if options.contenders and name not in (*options.contenders, "eager"):
            continue
        started = time.perf_counter()
        try:
            made[name] = build(name, builder, model, inputs)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        build_s[name] = time.perf_counter() - started
        print(f"{case.name}: {name} {failed.get(name, 'built')} ({build_s[name]:.1f} s)", flush=True)
    errors = {name: relative_error(call(contender, inputs), expected) for name, contender in made.items()}
    rows, final = race(made, inputs, options.time_budget)
    for name, entry in rows.items():
        entry |= {"build_s": build_s[name], "relative_error": errors[name]}
        entry |= {"error_over_eager": quotient(errors[name], errors["eager"])}
    row = {"contenders": rows, "failed": failed, "threads": final.threads, "dtype": str(case.dtype)}
    row |= rivals(final)
    if "refold" in made:
        row["refold_report"] = summarise_report(made["refold"])
    print(f"{case.name}\n{final}\n{headline(row)}", flush=True)
    return row


def left_out_this_time(before: dict[str, Any] | None, options: argparse.Namespace) -> dict[str, Any]:
    """Modes of torch.compile that are in the last race of a case and not in this one: how many times the time of the
    best mode they took then."""
    if before is None or not options.contenders:
        return {}
    modes = {n: e["median_s"] for n, e in before["contenders"].items() if n.startswith(COMPILE)}
    took = {name: seconds / min(modes.values()) for name, seconds in modes.items()} | before.get("earlier", {})
    return {"earlier": {name: ratio for name, ratio in took.items() if name not in options.contenders}}


def quotient(error: float | None, own: float | None) -> float | None:
    return error / own if error is not None and own else None


def race(made: dict[str, Any], inputs: Inputs, time_budget: float) -> tuple[dict[str, Any], Comparison]:
    """A heat of all, where the hopeless leave early, then a final of eager, Refold and the best of each kind."""
    heat = measure_many(made, inputs, time_budget=time_budget / 2, baseline="eager")
    finalists = {"eager", "refold", *best_of_each_kind(heat)} & made.keys()
    final = measure_many(
        {name: made[name] for name in made if name in finalists},
        inputs,
        time_budget=time_budget / 2,
        at_least=rounds_needed(0.95),
        keep=finalists,
        baseline="eager",
    )
    rows = {}
    for timing in heat.ranked:
        source = final if timing.name in finalists else heat
        rows[timing.name] = source.timings[timing.name].to_dict() | {
            "speedup": source.speedup(timing.name),
            "final": timing.name in finalists,
        }
    return rows, final


def best_of_each_kind(comparison: Comparison) -> list[str]:
    """The fastest compile mode and the fastest engine."""
    names = [timing.name for timing in comparison.ranked]
    kinds = [[name for name in names if name.startswith(COMPILE)], [name for name in names if name in ENGINES]]
    return [kind[0] for kind in kinds if kind]


def rivals(final: Comparison) -> dict[str, Any]:
    """Refold against the best compile mode and the best engine, round by round."""
    result = {}
    for rival in best_of_each_kind(final) if "refold" in final.timings else []:
        against = final.between(rival, "refold")
        kind = "engine" if rival in ENGINES else "compile"
        result[f"over_best_{kind}"] = {key: against.to_dict()[key] for key in ("ratio", "interval")} | {"rival": rival}
    return result


def summarise_report(optimized: Any) -> str | None:
    """What Refold says that it did, as text, where the report offers it."""
    report = getattr(optimized, "report", None)
    return None if report is None else str(report)[:4000]


def headline(row: dict[str, Any]) -> str:
    parts = [
        f"refold over {row[key]['rival']}: {row[key]['ratio']:.3f}×" for key in row if key.startswith("over_best_")
    ]
    return "  ".join(parts) or "refold was not among them"


def summary(data: dict[str, Any]) -> str:
    """One line a case, and the geometric means that matter."""
    lines = [f"{name:22s} {headline(row)}" for name, row in data["cases"].items()]
    for key in ("over_best_compile", "over_best_engine"):
        ratios = [row[key]["ratio"] for row in data["cases"].values() if key in row]
        if ratios:
            lines.append(f"{key}: geometric mean {geometric_mean(ratios):.3f}×, lowest {min(ratios):.3f}×")
    return "\n".join(lines)


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


if __name__ == "__main__":
    main()
