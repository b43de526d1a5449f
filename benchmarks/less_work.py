"""What leaving work out is worth: Refold against the best way that a user could pick by hand, interleaved.

    python benchmarks/less_work.py --work encoders decoders --models bert roberta --device cpu

Sentences have natural lengths, drawn by seed (`padded_models.py`). Results are written after each row, and rows that
the file has already are left alone (unless `--again`). Every contender computes on its own copy of the model.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from accuracy import reference, relative_error
from contenders import COMPILE, Builder, build, compiled, keep_eager, onnx_runtime, openvino
from models import ENGINES, RESULTS, geometric_mean, machine
from padded_models import DECODERS, ENCODERS, RELATIVE, TextModel, batch, lengths, padded_to
from suite import Inputs, call

from refold.measurement.timing import Comparison, measure_many, rounds_needed

REFOLD = "refold"
_ROUNDS, _CALLS = 7, 30  # of calls that are not waited for
WORK = ("encoders", "relative", "decoders", "no padding", "little padding")


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    torch._dynamo.config.recompile_limit = 64  # contenders share the code objects of one model
    path = options.out or RESULTS / f"less_work_{'gpu' if options.device == 'cuda' else 'cpu'}.json"
    data = {"machine": machine(options.device), "rows": {}}
    if path.exists():
        data["rows"] = json.loads(path.read_text())["rows"]
    started = time.monotonic()
    for work, model, size in rows(options):
        name = f"{work}: {model.name} b{size}"
        if name in data["rows"] and not options.again:
            continue
        if options.budget_s and time.monotonic() - started > options.budget_s:
            print(f"{name}: out of time, run again to go on")
            break
        data["rows"][name] = run(work, model, size, options)
        path.write_text(json.dumps(data, indent=1) + "\n")
        torch.compiler.reset()
        gc.collect()
    print(summary(data["rows"]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--work", nargs="*", choices=WORK, default=list(WORK))
    parser.add_argument("--models", nargs="*", help="names of padded_models.py; all when left out")
    parser.add_argument("--batches", nargs="*", type=int, default=[16, 32])
    parser.add_argument("--contenders", nargs="*", help="only these; eager and refold are always among them")
    parser.add_argument("--effort", default="default", help="of refold.optimize")
    parser.add_argument("--threads", type=int, help="CPU threads, for every contender")
    parser.add_argument("--time-budget", type=float, default=30.0, help="seconds of measuring a row")
    parser.add_argument("--budget-s", type=float, help="start no further row after this many seconds")
    parser.add_argument("--out", type=Path, help="the file to write, instead of benchmarks/results/less_work_*.json")
    parser.add_argument("--again", action="store_true", help="run rows that the file has already")
    return parser.parse_args()


def rows(options: argparse.Namespace) -> Iterator[tuple[str, TextModel, int]]:
    models = {"encoders": ENCODERS, "relative": RELATIVE, "decoders": DECODERS}
    for work in options.work:
        for model in models.get(work, ENCODERS):
            if options.models and model.name not in options.models:
                continue
            for size in options.batches:
                yield work, model, size


def drawn(work: str, size: int) -> list[int]:
    """Lengths of the sentences of a batch."""
    if work == "no padding":
        return padded_to(0.0, size)
    return padded_to(0.2, size) if work == "little padding" else lengths(size)


def refold_optimize(effort: str) -> Builder:
    def make(model: nn.Module, inputs: Inputs) -> Callable[..., Any]:
        import refold

        return refold.optimize(copy.deepcopy(model), inputs, effort=effort, progress=False, cache=False)

    return make


def contenders(device: str, effort: str) -> dict[str, Builder]:
    """Every rival is built for exactly this batch, which suits it best."""
    rivals: dict[str, Builder] = {
        "eager": keep_eager,
        COMPILE: compiled(),
        f"{COMPILE} freezing": compiled(freezing=True),
    }
    if device == "cuda":
        rivals[f"{COMPILE} reduce-overhead"] = compiled("reduce-overhead")
        rivals[f"{COMPILE} reduce-overhead freezing"] = compiled("reduce-overhead", freezing=True)
    else:
        rivals |= {"onnxruntime": onnx_runtime, "openvino": openvino}
    return rivals | {REFOLD: refold_optimize(effort)}


def run(work: str, text: TextModel, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Build all contenders of a row, grade them against float64, and measure them in turn."""
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model = text.build(options.device, dtype)
    sizes = drawn(work, size)
    inputs = batch(sizes, device=options.device)
    expected = reference(model, inputs)
    made, failed, build_s = {}, {}, {}
    for name, builder in contenders(options.device, options.effort).items():
        if options.contenders and name not in (*options.contenders, "eager", REFOLD):
            continue
        started = time.perf_counter()
        try:
            made[name] = build(name, builder, model, inputs)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        build_s[name] = round(time.perf_counter() - started, 1)
        print(f"{work}: {text.name} b{size}: {name} {failed.get(name, 'built')} ({build_s[name]} s)", flush=True)
    errors = {name: relative_error(call(contender, inputs), expected) for name, contender in made.items()}
    compared = measure_many(
        made,
        inputs,
        time_budget=options.time_budget,
        at_least=rounds_needed(0.95),
        baseline="eager",
        keep=("eager", REFOLD),
        memory=False,
    )
    row = {
        "work": work,
        "held_out": text.held_out,
        "real_tokens": sum(sizes) / (size * max(sizes)),
        "dtype": str(dtype),
        "threads": compared.threads,
        "build_s": build_s,
        "failed": failed,
        "relative_error": errors,
        "contenders": {name: timing.to_dict() for name, timing in compared.timings.items()},
        "over_best": over_best(compared),
        **({"back_to_back": back_to_back(made, inputs)} if options.device == "cuda" else {}),
        "chosen": [row.name for row in made[REFOLD].report.executors if row.choice == "chosen"]
        if REFOLD in made
        else [],
        "kept": [step.name for step in made[REFOLD].report.kept] if REFOLD in made else [],
    }
    print(compared, row["over_best"], row["chosen"], row["kept"], flush=True)
    return row


def back_to_back(made: dict[str, Callable[..., Any]], inputs: Inputs) -> dict[str, Any]:
    """Seconds of a call where none is waited for, as on a busy GPU, all in turn; and Refold against the best rival."""
    seconds: dict[str, list[float]] = {name: [] for name in made}
    with torch.no_grad():
        for _ in range(_ROUNDS):
            for name, run in made.items():
                for _ in range(3):
                    run(**inputs)
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(_CALLS):
                    run(**inputs)
                torch.cuda.synchronize()
                seconds[name].append((time.perf_counter() - started) / _CALLS)
    found = {name: statistics.median(each) for name, each in seconds.items()}
    best = min(value for name, value in found.items() if name != REFOLD)
    return {"seconds": found, "over_best": best / found[REFOLD] if REFOLD in found else None}


def over_best(compared: Comparison) -> dict[str, Any]:
    """Refold against the fastest rival of all, against the fastest that runs torch's own operators, and eager."""
    if REFOLD not in compared.timings:
        return {}
    ranked = [timing.name for timing in compared.ranked if timing.name != REFOLD]
    rivals = {
        "of all": ranked[0],
        "of torch": next(name for name in ranked if name not in ENGINES),
        "eager": "eager",
    }
    found = {}
    for kind, rival in rivals.items():
        against = compared.between(rival, REFOLD)
        found[kind] = {"rival": rival, "ratio": against.ratio, "interval": against.interval}
    return found


def summary(done: dict[str, Any]) -> str:
    """One line a row, and the geometric means of each kind of work."""
    lines = []
    for work in WORK:
        mine = {name: row for name, row in done.items() if row["work"] == work and row["over_best"]}
        for name, row in mine.items():
            best = row["over_best"]["of all"]
            low, high = best["interval"]
            lines.append(f"{name:36s} {best['ratio']:.2f}× [{low:.2f}, {high:.2f}] over {best['rival']}")
        ratios = [row["over_best"]["of all"]["ratio"] for row in mine.values()]
        if ratios:
            lines.append(f"{work}: geometric mean {geometric_mean(ratios):.2f}×, lowest {min(ratios):.2f}×")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
