"""Make every executed line of every rewrite fail, on the way there and back, with an exception and with Ctrl-C.

    python benchmarks/faults.py [names of rewrites]

Writes benchmarks/results/faults.json: for each rewrite, how many lines were tried and which left a trace.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch

import refold.transformations
from refold.rewrite import Rewrite, registered
from refold.testing.faults import Fault, check_faults, chosen_places, executed_lines, of_transformation
from refold.testing.laws import graph_of

RESULTS = Path(__file__).parent / "results" / "faults.json"


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wanted = set(sys.argv[1:])
    report = {}
    for cls in registered():
        if cls.__module__.startswith("refold.") and (not wanted or cls.__name__ in wanted):
            report[cls.__name__] = try_all(cls())
            print(cls.__name__, report[cls.__name__], flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")


def try_all(rewrite: Rewrite) -> dict[str, object]:
    """Every line, on the rewrite's first example; both kinds of fault."""
    model, _ = next(iter(rewrite.examples()))
    found = [s for e in (Fault, KeyboardInterrupt) for s in check_faults(rewrite, graph_of(model), error=e)]
    gm = graph_of(model)
    lines = executed_lines(lambda: rewrite(gm), of_transformation(rewrite))
    lines += executed_lines(lambda: refold.undo(gm, None), of_transformation(rewrite))
    return {"lines tried": 2 * len(chosen_places(lines, None)), "different lines": len(set(lines)), "damaged": found}


if __name__ == "__main__":
    main()
