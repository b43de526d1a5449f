"""What Refold is for, in a minute: a sentence classifier on 32 sentences of natural lengths, against what a user could
pick by hand, with what was left out, how exact it is, and the proof that the original comes back bit for bit.

    python benchmarks/demo.py --out out/demo

Nothing is downloaded: the weights are random. Every rival is built for exactly this batch, which suits it best.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from accuracy import reference, relative_error
from contenders import COMPILE, build, compiled, keep_eager, onnx_runtime, openvino
from suite import Inputs, call

import refold
from refold.command_line.builtin_models import EXAMPLES
from refold.measurement.timing import Comparison, measure_many, rounds_needed
from refold.report.text import exactness_sentence, left_out_sentence

RIVALS = {"eager": keep_eager, COMPILE: compiled(), "ONNX Runtime": onnx_runtime, "OpenVINO": openvino}
REFOLD = "Refold"
SECONDS = 12.0
console = Console(highlight=False, soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="the folder for the report")
    options = parser.parse_args()
    started = time.monotonic()
    model, inputs = subject()
    show_padding(inputs)
    bits = {name: value.clone() for name, value in model.state_dict().items()}
    before = call(model, inputs)
    ways, ready = prepared(model, inputs)
    fast: Any = ways[REFOLD]
    compared = measure_many(
        ways, inputs, time_budget=SECONDS, at_least=rounds_needed(0.95), baseline="eager", keep=list(ways), memory=False
    )
    show_ways(compared, ready)
    show_work(fast.report, ways, inputs, reference(model, inputs))
    prove_restored(fast, model, inputs, bits, before)
    page = fast.report.write_html(options.out / "report.html")
    console.print(f"The whole report: {page.absolute()} ({time.monotonic() - started:.0f} s in all)")


def subject() -> tuple[nn.Module, Inputs]:
    """The model and its batch."""
    example = EXAMPLES["sentence-classifier"]
    assert example.inputs is not None
    console.print(f"A {example.about}; random weights, {torch.get_num_threads()} threads.")
    return example.build().requires_grad_(False), example.inputs()


def show_padding(inputs: Inputs) -> None:
    mask = inputs["attention_mask"]
    console.print(f"{int(mask.sum()):,} of {mask.numel():,} places of the batch are words; the others are padding.\n")


def prepared(model: nn.Module, inputs: Inputs) -> tuple[dict[str, Any], dict[str, float]]:
    """Every way to run the model, ready, and the seconds that this took. Rivals run copies."""
    ways: dict[str, Any] = {}
    ready: dict[str, float] = {}
    with console.status("") as status:
        for name, builder in (RIVALS | {REFOLD: lambda *_: refold.optimize(model, inputs, progress=False)}).items():
            status.update(f"preparing {name}")
            started = time.monotonic()
            try:
                ways[name] = build(name, builder, copy.deepcopy(model), inputs)
            except ImportError as error:
                console.print(f"{name} is left out: {error}")
                continue
            ready[name] = time.monotonic() - started
        status.update("timing them in turn")
    return ways, ready


def show_ways(compared: Comparison, ready: dict[str, float]) -> None:
    """All ways with their spread, the fastest first."""
    table = Table("way to run it", title="one batch, all ways in turn", title_justify="left")
    for heading in ("median", "half of the calls between", "over eager", "ready after"):
        table.add_column(heading, justify="right")
    for timing in compared.ranked:
        low, high = timing.quartiles
        over = "" if timing.name == "eager" else f"{compared.between('eager', timing.name).ratio:.2f}×"
        style = "bold" if timing.name == REFOLD else ""
        spread = f"{low * 1e3:.0f} – {high * 1e3:.0f} ms"
        table.add_row(
            timing.name, f"{timing.median * 1e3:.0f} ms", spread, over, f"{ready[timing.name]:.0f} s", style=style
        )
    console.print(table)
    best = next(timing.name for timing in compared.ranked if timing.name != REFOLD)
    against = compared.between(best, REFOLD)
    low, high = against.interval
    console.print(f"Refold against {best}, the best of the others: {against.ratio:.2f}× [{low:.2f}, {high:.2f}]\n")


def show_work(report: Any, ways: dict[str, Any], inputs: Inputs, expected: list[torch.Tensor]) -> None:
    """What was left out, and why that is exact."""
    for work in report.left_out:
        console.print(f"Left out: {left_out_sentence(work)}.")
    console.print(
        "Why that is exact: nothing that is read depends on padding, which was tried with garbage there. Each call\n"
        "looks at its own mask; where that is of another kind than those tried, the same graph computes everything.\n"
        f"Compared in float64: {exactness_sentence(report.exactness)}."
    )
    errors = {name: relative_error(call(ways[name], inputs), expected) for name in ("eager", REFOLD)}
    console.print(f"Error of the outputs: {errors['eager']:.1e} in eager, {errors[REFOLD]:.1e} with Refold.\n")


def prove_restored(fast: Any, model: nn.Module, inputs: Inputs, bits: dict[str, torch.Tensor], before: Any) -> None:
    """Give the model back, and compare every bit."""
    restored = fast.restore()
    weights = model.state_dict()
    alike = [restored is model, weights.keys() == bits.keys(), torch.equal(call(model, inputs).logits, before.logits)]
    if not all(alike) or not all(torch.equal(value, bits[name]) for name, value in weights.items()):
        raise SystemExit("The original did not come back.")
    console.print(f"Restored: the same object, its {len(bits)} tensors and its outputs, bit for bit.")


if __name__ == "__main__":
    main()
