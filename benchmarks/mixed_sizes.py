"""Batches of mixed sizes (1 to 16 rows of up to 8 to 256 tokens), padded and not, against all that takes any size.

    python benchmarks/mixed_sizes.py --device cpu
    python benchmarks/mixed_sizes.py --models bert --work padded --batches 10 --rounds 3

Rivals are what a user could pick by hand: eager, `torch.compile(dynamic=True)` (on a GPU its reduce-overhead, too), and
on a CPU ONNX Runtime and OpenVINO with open axes. All are built from the first batch and take turns; each size is also
timed by itself, against eager. One model was tuned on, the others were held out. Results are kept after each row.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from less_work import REFOLD, over_best
from models import RESULTS, machine
from padded_models import TEXT_MODELS
from text_stream import at_each_size, build, contenders, in_turn, mixed

from refold.measurement.timing import measure_many

MODELS = ("bert", "modernbert", "esm")
WORK = ("padded", "full")


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    torch._dynamo.config.recompile_limit = 64
    path = options.out or RESULTS / f"mixed_sizes_{'gpu' if options.device == 'cuda' else 'cpu'}.json"
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    data["machine"] = machine(options.device)
    for name in options.models:
        for work in options.work:
            data["rows"][f"{name}: {work}"] = row = measured(name, work, options)
            path.write_text(json.dumps(data, indent=1) + "\n")
            print(f"{name}, {work}: {row['over_best']}; slower than eager at {row['slower_than_eager_at']}", flush=True)
            torch.compiler.reset()
            gc.collect()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="*", choices=tuple(TEXT_MODELS), default=list(MODELS))
    parser.add_argument("--work", nargs="*", choices=WORK, default=list(WORK))
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--effort", default="default", help="of refold.optimize")
    parser.add_argument("--each-size", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def measured(name: str, work: str, options: argparse.Namespace) -> dict[str, Any]:
    """One model on one kind of batches."""
    text = TEXT_MODELS[name]
    model = text.build(options.device, torch.bfloat16 if options.device == "cuda" else torch.float32)
    calls = mixed(padded=work == "padded", device=options.device)[: options.batches]
    made, failed, ready = {}, {}, {}
    for way, builder in contenders(SimpleNamespace(device=options.device, effort=options.effort)).items():
        started = time.perf_counter()
        try:
            made[way] = build(way, builder, model, calls[0])
        except Exception as error:
            failed[way] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ready[way] = time.perf_counter() - started
        print(f"{name}, {work}: {way} {failed.get(way, 'ready')} ({ready[way]:.1f} s)", flush=True)
    compared = measure_many(
        {way: in_turn(run) for way, run in made.items()},
        {"work": calls},
        repeats=options.rounds,
        baseline="eager",
        keep=("eager", REFOLD),
        memory=False,
    )
    sizes = at_each_size(made, calls) if options.each_size else {}
    prepared = made[REFOLD].prepared
    return {
        "held_out": text.held_out,
        "batches": len(calls),
        "real_tokens": sum(int(c["attention_mask"].sum()) for c in calls) / sum(c["input_ids"].numel() for c in calls),
        "ready_s": ready,
        "failed": failed,
        "chosen": {"at_example": prepared.at_example.executor, "at_any_size": prepared.at_any_size.executor},
        "contenders": {way: timing.to_dict() for way, timing in compared.timings.items()},
        "over_best": over_best(compared),
        "over_eager_at_each_size": sizes,
        "slower_than_eager_at": [size for size, (_ratio, _low, high) in sizes.items() if high < 1],
    }


if __name__ == "__main__":
    main()
