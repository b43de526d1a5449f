"""Texts a second of a text encoder: batches of all sizes, in arrival order (a server), sorted by length, or mixed.

    python benchmarks/text_stream.py --texts 2000 --device cpu
    python benchmarks/text_stream.py --model bert --orders mixed "mixed, no padding"

Every contender takes batches of any size, and is built from the first of them. The texts and their order are drawn by
seed, the same for all. Mixed batches have 1 to 16 rows of up to 8 to 256 tokens; each is also timed by itself.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from contenders import COMPILE, Builder, build, compiled, keep_eager
from less_work import REFOLD, over_best
from models import RESULTS, machine
from padded_models import ENCODERS, batch, lengths
from suite import Inputs

from refold.measurement.timing import measure_many

ORDERS = ("arrival", "sorted", "mixed", "mixed, no padding")
MIXED = 40
Run = Callable[..., Any]


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    torch._dynamo.config.recompile_limit = 64
    path = options.out or RESULTS / f"text_stream_{'gpu' if options.device == 'cuda' else 'cpu'}.json"
    data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    data["machine"] = machine(options.device)
    text = next(model for model in ENCODERS if model.name == options.model)
    model = text.build(options.device, torch.bfloat16 if options.device == "cuda" else torch.float32)
    made, failed = built(model, batches(options.orders[0], options)[0], options)
    for order in options.orders:
        work = batches(order, options)
        options.texts = sum(len(one["input_ids"]) for one in work)
        ways = {name: in_turn(run) for name, run in made.items()}
        compared = measure_many(
            ways, {"work": work}, repeats=options.rounds, baseline="eager", keep=("eager", REFOLD), memory=False
        )
        seconds = {name: timing.median for name, timing in compared.timings.items()}
        real = sum(int(one["attention_mask"].sum()) for one in work)
        data["rows"][f"{text.name}: {order}"] = {
            "texts": options.texts,
            "failed": failed,
            "real_tokens": real / sum(one["attention_mask"].numel() for one in work),
            "texts_per_second": {name: options.texts / value for name, value in seconds.items()},
            "contenders": {name: timing.to_dict() for name, timing in compared.timings.items()},
            "over_best": over_best(compared),
            "over eager at each size": at_each_size(made, work) if order.startswith("mixed") else None,
        }
        path.write_text(json.dumps(data, indent=1) + "\n")
        row = data["rows"][f"{text.name}: {order}"]
        print(order, row["texts_per_second"], row["over_best"], row["over eager at each size"], flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="minilm-mean")
    parser.add_argument("--orders", nargs="*", choices=ORDERS, default=["arrival", "sorted"])
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--effort", default="default", help="of refold.optimize")
    parser.add_argument("--contenders", nargs="*", help="only these; eager and refold are always among them")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def batches(order: str, options: argparse.Namespace) -> list[Inputs]:
    """The texts in batches, each padded to its longest."""
    if order.startswith("mixed"):
        return mixed(padded=order == "mixed", device=options.device)
    sizes = lengths(options.texts, seed=1)
    if order == "sorted":
        sizes.sort(reverse=True)  # as sentence-transformers does
    cut = range(0, len(sizes), options.batch)
    return [batch(sizes[i : i + options.batch], seed=i, device=options.device) for i in cut]


def mixed(padded: bool, device: str) -> list[Inputs]:
    """Batches of other sizes each; rows are as long as those of a natural text beside the longest one."""
    draw, found = random.Random(2), []
    for seed in range(MIXED):
        rows, longest = draw.randint(1, 16), draw.randint(8, 256)
        natural = [draw.lognormvariate(0, 0.6) for _ in range(rows)]
        sizes = [max(4, round(longest * each / max(natural))) if padded else longest for each in natural]
        found.append(batch(sizes, seed=seed, device=device))
    return found


def at_each_size(made: dict[str, Run], work: list[Inputs]) -> dict[str, Any]:
    """How much faster than eager a call of each size is, with the interval of the measurement."""
    pair = {name: made[name] for name in ("eager", REFOLD)}
    found = {}
    for one in work:
        compared = measure_many(pair, one, repeats=9, baseline="eager", keep=tuple(pair), memory=False)
        against = compared.between("eager", REFOLD)
        found["x".join(str(size) for size in one["input_ids"].shape)] = [against.ratio, *against.interval]
    return found


def built(model: nn.Module, example: Inputs, options: argparse.Namespace) -> tuple[dict[str, Run], dict[str, str]]:
    """What could be built for batches of any size, and why the rest could not."""
    made, failed = {}, {}
    for name, builder in contenders(options).items():
        if options.contenders and name not in (*options.contenders, "eager", REFOLD):
            continue
        started = time.perf_counter()
        try:
            made[name] = build(name, builder, model, example)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(f"{name} {failed.get(name, 'built')} ({time.perf_counter() - started:.1f} s)", flush=True)
    return made, failed


def in_turn(run: Run) -> Run:
    """One pass over all batches; the results wait on the device, as a server would let them."""
    return lambda work: [run(**one) for one in work]


def contenders(options: argparse.Namespace) -> dict[str, Builder]:
    rivals: dict[str, Builder] = {"eager": keep_eager, f"{COMPILE} dynamic": compiled(dynamic=True)}
    if options.device == "cuda":
        rivals[f"{COMPILE} dynamic reduce-overhead"] = compiled("reduce-overhead", dynamic=True)
    else:
        rivals |= {"onnxruntime": open_onnx_runtime, "openvino": open_openvino}
    return rivals | {REFOLD: lambda model, example: refold_optimize(model, example, options)}


def refold_optimize(model: nn.Module, example: Inputs, options: argparse.Namespace) -> Run:
    import refold

    return refold.optimize(copy.deepcopy(model), example, effort=options.effort, progress=False, cache=False)


def _open(example: Inputs) -> dict[str, Any]:
    return {name: {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO} for name in example}


def open_onnx_runtime(model: nn.Module, example: Inputs) -> Run:
    import tempfile

    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        program = torch.onnx.export(
            model, (), kwargs=example, dynamic_shapes=_open(example), dynamo=True, verbose=False
        )
        program.save(str(path), external_data=True)
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    return lambda **given: session.run(None, {name: given[name].numpy() for name in names})


def open_openvino(model: nn.Module, example: Inputs) -> Run:
    import openvino as ov

    converted = ov.convert_model(torch.export.export(model, (), example, dynamic_shapes=_open(example), strict=False))
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    engine = ov.Core().compile_model(converted, "CPU", settings | {"PERFORMANCE_HINT": "LATENCY"})

    def call(**given: torch.Tensor) -> list[Any]:
        result = engine([value.numpy() for value in given.values()], share_inputs=True)
        return [result[index] for index in range(len(engine.outputs))]

    return call


if __name__ == "__main__":
    main()
