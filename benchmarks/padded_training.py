"""Training steps on padded batches: eager, torch.compile in train mode, and the graph whose padding was left out.

    python benchmarks/padded_training.py --steps 50

A step is forward, backward and AdamW on a classifier of 6 layers, without dropout. The losses of the same steps are
compared in float64, where they must agree to rounding, and in float32 beside two eager runs with other threads.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from models import RESULTS, machine
from padded_models import MINI, batch, lengths

import refold
from refold.measurement.timing import measure_many, rounds_needed

Step = Callable[..., torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=50, help="whose losses are compared")
    parser.add_argument("--time-budget", type=float, default=60.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=RESULTS / "padded_training_cpu.json")
    options = parser.parse_args()
    threads = options.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    sizes = lengths(options.batch)
    inputs = batch(sizes)
    steps = {name: step_of(make(classifier())) for name, make in ways(inputs).items()}
    compared = measure_many(
        steps,
        inputs,
        time_budget=options.time_budget,
        at_least=rounds_needed(0.95),
        grad=True,
        baseline="eager",
        keep=tuple(steps),
        memory=False,
    )
    print(compared)
    data = {
        "machine": machine("cpu"),
        "real_tokens": sum(sizes) / (len(sizes) * max(sizes)),
        "contenders": {name: timing.to_dict() for name, timing in compared.timings.items()},
        "over": {
            name: {"ratio": found.ratio, "interval": found.interval}
            for name in compared.timings
            if name != "refold" and (found := compared.between(name, "refold"))
        },
        "losses": agreement(options, threads),
    }
    print(json.dumps({key: data[key] for key in ("over", "losses")}, indent=1))
    options.out.write_text(json.dumps(data, indent=1) + "\n")


def classifier(dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(**MINI, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForSequenceClassification(config).to(dtype).train()


def ways(inputs: dict[str, torch.Tensor]) -> dict[str, Callable[[nn.Module], nn.Module]]:
    return {"eager": lambda m: m, "torch.compile": torch.compile, "refold": lambda m: without_padding(m, inputs)}


def without_padding(model: nn.Module, inputs: dict[str, torch.Tensor]) -> nn.Module:
    gm = refold.trace(model, **inputs)
    gm = refold.compose(refold.RemoveNoOps(), refold.FuseAttention(), refold.RemovePadding())(gm)
    assert "token_plan" in gm.code, refold.result(gm)
    return gm


def step_of(model: nn.Module) -> Step:
    """Forward, backward and AdamW on the same labels for all."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(**inputs: torch.Tensor) -> torch.Tensor:
        labels = inputs["input_ids"][:, 1] % 2
        optimizer.zero_grad()
        loss = F.cross_entropy(model(**inputs)["logits"], labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def agreement(options: argparse.Namespace, threads: int) -> dict[str, Any]:
    """The largest difference of two runs' losses over the steps, on a new batch in each."""

    def losses(dtype: torch.dtype, packed: bool, threads: int) -> torch.Tensor:
        torch.set_num_threads(threads)
        model = classifier(dtype)
        work = [batch(lengths(options.batch, seed=i), seed=i) for i in range(options.steps)]
        step = step_of(without_padding(copy.deepcopy(model), work[0]) if packed else model)
        return torch.stack([step(**one).double() for one in work])

    wide = (losses(torch.float64, False, threads) - losses(torch.float64, True, threads)).abs().max()
    eager = losses(torch.float32, False, threads)
    return {
        "float64": wide.item(),
        "float32": (eager - losses(torch.float32, True, threads)).abs().max().item(),
        "float32, eager with one thread and two": (losses(torch.float32, False, 1) - losses(torch.float32, False, 2))
        .abs()
        .max()
        .item(),
    }


if __name__ == "__main__":
    main()
