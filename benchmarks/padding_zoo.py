"""Remove padding from families of transformers, tiny and with random weights: packed or refused, and how exact.

    python benchmarks/padding_zoo.py [family ...]

Without families, all that transformers has a sequence classifier of. Each is captured in float64 with open sizes and
given to RemovePadding; where values are given out at padding, with `padding="zeros"`, and real positions are compared.
The packed graph is held against the model on batches of other sizes with padding on the right, on the left, in between,
none at all, and with a row that has no token. Writes benchmarks/results/padding_zoo.json: for each family how it was
packed or why not, and the largest difference relative to the largest number.
"""

from __future__ import annotations

import json
import platform
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from zoo_models import build

import refold
from refold import RemovePadding
from refold.nested import tensors_in
from refold.wording import first_line

RESULTS = Path(__file__).parent / "results" / "padding_zoo.json"
KINDS = ("right", "left", "mixed", "full", "empty")
ROWS = 4


def mask_of(kind: str, length: int) -> torch.Tensor:
    """A mask with some kind of padding."""
    lengths = torch.tensor([length, max(1, length // 3), 2, max(1, 2 * length // 3)])[:, None]
    right = (torch.arange(length) < lengths).long()
    if kind == "mixed":
        return right.gather(1, torch.rand(ROWS, length, generator=torch.Generator().manual_seed(1)).argsort(1))
    if kind == "empty":
        right[1] = 0
    return {"left": right.flip(1), "full": torch.ones_like(right)}.get(kind, right)


def inputs_of(words: int, kind: str, length: int) -> dict[str, torch.Tensor]:
    """Ids that agree with a mask: 0 and 1, which many models take for padding, stand nowhere else."""
    generator = torch.Generator().manual_seed(length)
    mask = mask_of(kind, length)
    return {"input_ids": torch.randint(3, words, mask.shape, generator=generator) * mask, "attention_mask": mask}


def differences(model: nn.Module, packed: nn.Module, words: int, zeros: bool) -> Iterator[tuple[str, float]]:
    """For each kind of padding, how far the packed graph is from the model."""
    for kind in KINDS:
        worst = 0.0
        for length in (9, 14):
            given = inputs_of(words, kind, length)
            expected, found = (tensors_in(m(**given)) for m in (model, packed))
            for a, b in zip(expected, found, strict=True):
                if zeros and a.shape[:2] == given["attention_mask"].shape:
                    a, b = (t[given["attention_mask"] != 0] for t in (a, b))
                scale = float(a.abs().nan_to_num(nan=0.0).max()) or 1.0
                wrong = not torch.equal(a.isnan(), b.isnan())
                worst = max(worst, float("inf") if wrong else float((a - b).abs().nan_to_num(nan=0.0).max()) / scale)
        yield kind, worst


def sweep(family: str) -> dict[str, Any]:
    """What became of one family."""
    try:
        model = build(family)[0].double().eval()
        config: Any = model.config
        words = int(getattr(config, "vocab_size", 0) or config.get_text_config().vocab_size)
        if getattr(config, "use_cache", False):
            config.use_cache = False
        gm = refold.trace(model, **inputs_of(words, "right", 11))
    except Exception as error:
        return {"outcome": "not captured", "reason": first_line(error)[:200]}
    zeros = False
    RemovePadding()(gm)
    outcome = refold.result(gm)
    if "padding='zeros'" in "".join(refused.reason for refused in outcome.refused):
        zeros = True
        RemovePadding(padding="zeros")(gm)
        outcome = refold.result(gm)
    if not outcome.rewritten:
        reasons = [f"{refused.node}: {refused.reason}" for refused in outcome.refused]
        return {"outcome": "refused", "reason": "; ".join(reasons) or "no mask with open sizes"}
    (plan,) = (n for n in gm.graph.nodes if n.target is torch.ops.refold.token_plan.default)
    found = dict(differences(model, gm, words, zeros))
    return {
        "outcome": "packed" if max(found.values()) < 1e-9 else "WRONG",
        "padding": "zeros" if zeros else "exact",
        "side": plan.args[3],
        "nodes": len(outcome.rewritten[0].nodes) - 1,
        "attention packed": sum(n.target is torch.ops.refold.packed_attention.default for n in gm.graph.nodes),
        "largest difference": found,
    }


def main(families: list[str]) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    chosen = families or sorted(modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.machine()}
    found: dict[str, Any] = {}
    for family in chosen:
        torch.manual_seed(0)
        try:
            found[family] = sweep(family)
        except Exception as error:
            found[family] = {"outcome": "failed", "reason": f"{type(error).__name__}: {first_line(error)}"[:300]}
        print(family, found[family], flush=True)
        counts = {o: sum(f["outcome"] == o for f in found.values()) for o in {f["outcome"] for f in found.values()}}
        RESULTS.write_text(json.dumps({"versions": versions, "counts": counts, "families": found}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
