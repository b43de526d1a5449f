"""Texts a second of a sentence encoder: batches of all sizes, in arrival order (a server) or sorted by length.

    python benchmarks/text_stream.py --texts 2000 --device cpu

Every contender takes batches of any size. The texts and their order are drawn by seed, the same for all.
"""

from __future__ import annotations

import argparse
import copy
import json
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

ORDERS = ("arrival", "sorted")
Run = Callable[..., Any]


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    torch._dynamo.config.recompile_limit = 64
    path = options.out or RESULTS / f"text_stream_{'gpu' if options.device == 'cuda' else 'cpu'}.json"
    data: dict[str, Any] = {"machine": machine(options.device), "rows": {}}
    text = next(model for model in ENCODERS if model.name == options.model)
    model = text.build(options.device, torch.bfloat16 if options.device == "cuda" else torch.float32)
    made, data["failed"] = built(model, batches("arrival", options)[0], options)
    for order in ORDERS:
        work = batches(order, options)
        ways = {name: in_turn(run) for name, run in made.items()}
        compared = measure_many(
            ways, {"work": work}, repeats=options.rounds, baseline="eager", keep=("eager", REFOLD), memory=False
        )
        seconds = {name: timing.median for name, timing in compared.timings.items()}
        real = sum(int(one["attention_mask"].sum()) for one in work)
        data["rows"][order] = {
            "texts": options.texts,
            "real_tokens": real / sum(one["attention_mask"].numel() for one in work),
            "texts_per_second": {name: options.texts / value for name, value in seconds.items()},
            "contenders": {name: timing.to_dict() for name, timing in compared.timings.items()},
            "over_best": over_best(compared),
        }
        path.write_text(json.dumps(data, indent=1) + "\n")
        print(order, data["rows"][order]["texts_per_second"], data["rows"][order]["over_best"], flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default="minilm-mean")
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
    sizes = lengths(options.texts, seed=1)
    if order == "sorted":
        sizes.sort(reverse=True)  # as sentence-transformers does
    cut = range(0, len(sizes), options.batch)
    return [batch(sizes[i : i + options.batch], seed=i, device=options.device) for i in cut]


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

    return refold.optimize(copy.deepcopy(model), example, effort=options.effort, progress=False)


def _open(example: Inputs) -> dict[str, Any]:
    rows, columns = torch.export.Dim("rows", min=2), torch.export.Dim("columns", min=2)
    return {name: {0: rows, 1: columns} for name in example}


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
