"""Both error rates of `refold.verify`: alarms on right rewrites, and planted defects that pass, in three dtypes.

python benchmarks/verify.py [--seeds 20] [--first-seed 0] [--minutes 8] [--output benchmarks/results/verify.json]

Right are Refold's rules on their examples, on random models and on small transformers, rewrites of somebody else, and
pairs of computations that are alike. Wrong are folds and merges with a mistake, and pairs of computations of which the
second has a defect that the example inputs hide. Another first seed draws other models, inputs and samples.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

import refold
from refold.errors import RefoldError
from refold.nested import map_tensors, named_leaves
from refold.record.stack import history
from refold.rewrite.registry import registered
from refold.rewrite.transformation import Transformation
from refold.testing.random_layers import random_model
from refold.verification.samples import as_calls
from refold.verification.verifier import verify

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from planted_pairs import EXACT, RIGHT, WRONG, plan
from verify_models import ALL, DEFECTS, DTYPES, MODELS, Divide, ForeignFold, MappedFold, Merge, build
from zoo_families import FAMILIES

Case = tuple[str, str, torch.dtype, int, Callable[[], tuple[GraphModule, Any, Transformation]]]
"""A name, a family, a dtype, a seed, and what makes the graph, its inputs and the rewrite."""

OWN = [cls for cls in registered() if cls.__module__.startswith("refold.")]
MIXED = (torch.float32, torch.bfloat16, torch.float64)


# --- cases -----------------------------------------------------------------------------------------------------------


def own_models(cases: list[tuple[str, str, Any]], seeds: range) -> Iterator[Case]:
    """Rewrites of small models, right or with a mistake."""
    for name, family, make in cases:
        for dtype in DTYPES:
            for seed in seeds:
                yield name, family, dtype, seed, lambda f=family, m=make, d=dtype, s=seed, n=name: _own(f, m, d, s, n)


def _own(family: str, make: Any, dtype: torch.dtype, seed: int, name: str) -> tuple[GraphModule, Any, Transformation]:
    gm, x = build(family, dtype, seed)
    if family == "conv" and gm.conv.bias is None and (seed % 2 or "bias not scaled" in name):
        gm.conv.bias = nn.Parameter(torch.randn(6).to(dtype))
    return gm, x, make()


def pairs(table: dict[str, Any], seeds: range) -> Iterator[Case]:
    """One computation in the place of another."""
    for name, pair in table.items():
        for host in ("given", "computed") if name not in EXACT else ("given",):
            for dtype in MIXED:
                for seed in seeds:
                    yield name, host, dtype, seed, lambda h=host, p=pair, d=dtype, s=seed: plan(h, *p, d, s)


def rules(sources: Callable[[int], Iterator[tuple[str, nn.Module, Any]]], seeds: range) -> Iterator[Case]:
    """Every rule on every model that it rewrites."""
    for seed in seeds:
        for family, model, inputs in sources(seed):
            for dtype in MIXED:
                gm = _graph(model, inputs, dtype)
                for rule in OWN if gm is not None else ():
                    given = _cast(inputs, dtype)
                    yield rule.__name__, family, dtype, seed, lambda g=gm, i=given, r=rule: (copy.deepcopy(g), i, r())


def _cast(inputs: Any, dtype: torch.dtype) -> Any:
    return map_tensors(inputs, lambda t: t.to(dtype) if t.is_floating_point() else t)


def _graph(model: nn.Module, inputs: Any, dtype: torch.dtype) -> GraphModule | None:
    """A captured graph in a dtype; None where it cannot be captured, or is captured in another dtype already."""
    call = as_calls(_cast(inputs, dtype))[0]
    try:
        if isinstance(model, GraphModule):
            return copy.deepcopy(model) if dtype == torch.float32 else copy.deepcopy(model).to(dtype)
        return refold.trace(copy.deepcopy(model).to(dtype), *call.args, **call.kwargs)
    except Exception:  # what torch does not run in a dtype is no case
        return None


def examples(seed: int) -> Iterator[tuple[str, nn.Module, Any]]:
    torch.manual_seed(seed)
    for rule in OWN:
        for number, (model, inputs) in enumerate(rule.examples()):
            yield f"example {number} of {rule.__name__}", model, inputs


def drawn(seed: int) -> Iterator[tuple[str, nn.Module, Any]]:
    yield ("a random model", *random_model(seed))


def transformers_models(seed: int) -> Iterator[tuple[str, nn.Module, Any]]:
    torch.manual_seed(seed)
    for name, make in FAMILIES.items():
        model, args, kwargs = make()
        yield name, model.eval(), kwargs if kwargs else args


RIGHT_REWRITES: list[tuple[str, str, Any]] = [
    ("all of Refold's classics", family, lambda: refold.compose(*ALL)) for family in MODELS
]
RIGHT_REWRITES += [("a fold without a map", "conv", ForeignFold), ("a fold with a map", "conv", MappedFold)]
RIGHT_REWRITES += [("a division", "conv", Divide), ("a merge", "attention", Merge)]


# --- judging ---------------------------------------------------------------------------------------------------------


def judged(gm: GraphModule, inputs: Any, rewrite: Transformation, seed: int) -> tuple[bool, bool, bool] | None:
    """Whether site by site, end to end in float64, and allclose each say 'right'; None where nothing was rewritten."""
    call = as_calls(inputs)[0]
    before = dict(named_leaves(_run(gm, call)))
    try:
        gm = rewrite(gm)
    except RefoldError:
        return None
    if not history(gm):
        return None
    found = verify(gm, inputs, transformations=[rewrite], seed=seed)
    try:
        after = dict(named_leaves(_run(gm, call)))
    except Exception:
        return found.right, False, False
    both = [(value, after.get(name)) for name, value in before.items() if isinstance(value, torch.Tensor)]
    close = all(isinstance(b, torch.Tensor) and _close(a, b) for a, b in both)
    return found.right, bool(found.outputs) and all(o.grade != "worse" for o in found.outputs), close


def _run(gm: GraphModule, call: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        return call.on(gm)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, equal_nan=True)


def rates(cases: Iterator[Case], want: bool, until: float) -> list[dict[str, Any]]:
    """How many of each case each of the three criteria calls right, as far as time goes; mistakes are printed."""
    rows: dict[tuple[str, str, str], Counter[str]] = {}
    for name, family, dtype, seed, make in cases:
        if time.perf_counter() > until:
            break
        answers = judged(*make(), seed)
        if answers is None:
            continue
        row = rows.setdefault((name, family, str(dtype).removeprefix("torch.")), Counter())
        row.update(tried=1, **dict(zip(("verify", "end_to_end", "allclose"), map(int, answers), strict=True)))
        if answers[0] != want:
            print("missed" if not want else "alarm", name, family, dtype, seed, flush=True)
    keys = ("tried", "verify", "end_to_end", "allclose")
    return [{"case": c, "family": f, "dtype": d} | {k: row[k] for k in keys} for (c, f, d), row in rows.items()]


def _text(summary: dict[str, Any], **parts: list[dict[str, Any]]) -> str:
    """JSON with one row a line."""
    rows = [f'"{name}": [\n' + ",\n".join(map(json.dumps, part)) + "\n]" for name, part in parts.items()]
    return "{\n" + ",\n".join([f'"summary": {json.dumps(summary)}', *rows]) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=8, help="for the random models, which come last")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/verify.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start, first = time.perf_counter(), options.first_seed
    many, few = range(first, first + options.seeds), range(first, first + max(2, options.seeds // 4))
    end = start + options.minutes * 60
    wrong = [*rates(own_models(list(DEFECTS), few[:2]), False, end), *rates(pairs(WRONG, few[:2]), False, end)]
    right = rates(own_models(RIGHT_REWRITES, many), True, end)
    right += rates(pairs(RIGHT, few), True, end)
    right += rates(rules(examples, range(first, first + 1)), True, end)
    right += rates(rules(transformers_models, range(first, first + 1)), True, end)
    right += rates(rules(drawn, range(first, first + 50 * options.seeds)), True, end)
    summary = {
        "right_rewrites": sum(r["tried"] for r in right),
        "false_alarms": {k: sum(r["tried"] - r[k] for r in right) for k in ("verify", "end_to_end", "allclose")},
        "planted_defects": sum(r["tried"] for r in wrong),
        "kinds_of_defects": len({r["case"] for r in wrong}),
        "missed": {k: sum(r[k] for r in wrong) for k in ("verify", "end_to_end", "allclose")},
        "first_seed": first,
        "seconds": round(time.perf_counter() - start, 1),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(_text(summary, right=right, wrong=wrong))
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
