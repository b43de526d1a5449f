"""Both error rates of `refold.verify`: alarms on right rewrites, and planted defects that pass, in three dtypes.

python benchmarks/verify.py [--seeds 20] [--output benchmarks/results/verify.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import refold
from refold.verify import verify

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "unit"))
from verify_models import ALL, DEFECTS, DTYPES, MODELS, Divide, ForeignFold, MappedFold, Merge, build

RIGHT: list[tuple[str, str, Any]] = [
    ("all of Refold's classics", family, lambda: refold.compose(*ALL)) for family in MODELS
]
RIGHT += [("a fold without a map", "conv", ForeignFold), ("a fold with a map", "conv", MappedFold)]
RIGHT += [("a division", "conv", Divide), ("a merge", "attention", Merge)]


def judged(family: str, make: Any, dtype: torch.dtype, seed: int) -> tuple[bool, bool, bool]:
    """Whether site by site, end to end in float64, and allclose each say 'right'."""
    gm, x = build(family, dtype, seed)
    if family == "conv" and gm.conv.bias is None and seed % 2:
        gm.conv.bias = nn.Parameter(torch.randn(6).to(dtype))
    with torch.no_grad():
        before = gm(x)
    rewrite = make()
    rewrite(gm)
    found = verify(gm, x, transformations=[rewrite], seed=seed)
    with torch.no_grad():
        after = gm(x)
    pairs = zip(*(v if isinstance(v, tuple) else (v,) for v in (before, after)), strict=True)
    close = all(a is b or torch.allclose(a, b) for a, b in pairs)
    return found.right, all(o.grade != "worse" for o in found.outputs), close


def rates(cases: list[tuple[str, str, Any]], seeds: range) -> list[dict[str, Any]]:
    """How many of each case each of the three criteria calls right."""
    rows = []
    for name, family, make in cases:
        for dtype in DTYPES:
            answers = [judged(family, make, dtype, seed) for seed in seeds if usable(name, family, seed)]
            counts = [sum(a[i] for a in answers) for i in range(3)]
            dtype_name = str(dtype).removeprefix("torch.")
            row = {"case": name, "family": family, "dtype": dtype_name, "tried": len(answers)}
            rows.append(row | dict(zip(("verify", "end_to_end", "allclose"), counts, strict=True)))
            print(rows[-1], flush=True)
    return rows


def usable(name: str, family: str, seed: int) -> bool:
    """A bias that is not there cannot be left unscaled: half of the models have none."""
    if name != "map: bias not scaled":
        return True
    return build(family, torch.float32, seed)[0].conv.bias is not None or bool(seed % 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/verify.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    right, wrong = rates(RIGHT, range(options.seeds)), rates(list(DEFECTS), range(options.seeds))
    summary = {
        "right_rewrites": sum(r["tried"] for r in right),
        "false_alarms": {k: sum(r["tried"] - r[k] for r in right) for k in ("verify", "end_to_end", "allclose")},
        "planted_defects": sum(r["tried"] for r in wrong),
        "missed": {k: sum(r[k] for r in wrong) for k in ("verify", "end_to_end", "allclose")},
        "seconds": round(time.perf_counter() - start, 1),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"summary": summary, "right": right, "wrong": wrong}, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
