"""The zoo: every model family of the installed transformers, captured, raised, rewritten, undone and compared.

    python benchmarks/zoo.py                 # sweep what is not in benchmarks/results/zoo.json yet
    python benchmarks/zoo.py --only bert vit # these families again
    python benchmarks/zoo.py --failed        # those that failed, again
    python benchmarks/zoo.py --timm          # a spread of timm's models instead (where timm is installed)
    python benchmarks/zoo.py --table         # write docs/zoo.md from the results

Every family runs in a process of its own (a fork, so that nothing is imported twice) under a time limit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
import zoo_models
import zoo_timm
from zoo_table import STEPS, table

from refold import (
    ChangeTrueDivToMulByInverse,
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    FuseBiasInLinear,
    MergeLinears,
    history,
    undo,
)
from refold.capture.tracing import capture_report, trace
from refold.verification.verifier import verify_last

CLASSIC = (
    MergeLinears(),
    FuseBiasInLinear(),
    ChangeTrueDivToMulByInverse(),
    FuseBatchNorm2dInConv2d(),
    FuseBatchNorm1dInLinear(),
)

RESULTS = Path(os.environ.get("ZOO_RESULTS", Path(__file__).resolve().parent / "results" / "zoo.json"))
TIMM_RESULTS = RESULTS.with_name("zoo_timm.json")
OPTIMIZED = RESULTS.with_name("zoo_optimize.json")  # made by zoo_optimize.py
TABLE = Path(__file__).resolve().parent.parent / "docs" / "zoo.md"
MUST = {
    *("Linear", "Embedding", "LayerNorm", "RMSNorm", "GroupNorm"),
    *(f"{kind}{d}d" for kind in ("Conv", "ConvTranspose", "BatchNorm") for d in (1, 2, 3)),
}


def main() -> None:
    options = _options()
    if options.table:
        TABLE.write_text(table(read(RESULTS), read(TIMM_RESULTS), read(OPTIMIZED), families()))
        return
    warm_up()
    stored, build = (TIMM_RESULTS, zoo_timm.build) if options.timm else (RESULTS, zoo_models.build)
    results = read(stored)
    wanted = options.only or (list(zoo_timm.MODELS) if options.timm else families())
    if options.failed:
        wanted = [n for n, r in results.items() if not _good(r)]
    elif not options.only:
        wanted = [n for n in wanted if n not in results]
        random.Random(0).shuffle(wanted)  # a sweep that is stopped early has seen a fair sample
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = {pool.submit(run_apart, name, build, options.timeout, steps_of): name for name in wanted}
        for done in as_completed(waiting):
            results[waiting[done]] = done.result()
            stored.parent.mkdir(exist_ok=True)
            stored.write_text(json.dumps(dict(sorted(results.items())), indent=1))
            print(waiting[done], json.dumps(done.result())[:300], flush=True)


def read(path: Path) -> dict[str, dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else {}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--failed", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--timm", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=60, help="seconds of processor time for a family")
    return parser.parse_args()


def families() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def warm_up() -> None:
    """Import and initialise once what every fork needs."""
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    model, inputs, _ = zoo_models.build("bert")
    trace(model, **inputs)
    gc.freeze()  # what every fork shares is not worth looking through again


def _good(result: dict[str, Any]) -> bool:
    if result["eager"] != "yes":
        return _not_here(result)
    return all(result.get(step) == "yes" for step in ("captured", "raised", "verified", "undone"))


def _not_here(result: dict[str, Any]) -> bool:
    return str(result.get("why", "")).startswith("not runnable here")


Build = Callable[[str], tuple[nn.Module, dict[str, torch.Tensor], str]]
Tell = Callable[[dict[str, Any]], None]


def run_apart(name: str, build: Build, timeout: int, steps: Callable[[str, Build, Tell], Any]) -> dict[str, Any]:
    """Run the steps of one family in a fork; what it cannot report (a crash, too long) is a result too."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _child(name, build, timeout, steps, writing)
    os.close(writing)
    with os.fdopen(reading) as stream:
        lines = stream.read().splitlines()
    _, status = os.waitpid(child, 0)
    result = json.loads(lines[-1]) if lines else {"eager": "no", "why": "ended without a word"}
    if os.WIFSIGNALED(status):
        limits = f"{timeout} s of processor time, {30 * timeout} s in all"
        result["why"] = f"stopped by {signal.Signals(os.WTERMSIG(status)).name} (limits: {limits})"
        step = next((s for s in STEPS if s not in result), "undone")
        result[step] = "no"
    return result


def _child(name: str, build: Build, timeout: int, steps: Callable[[str, Build, Tell], Any], writing: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (timeout, timeout + 5))  # a busy machine must not change the result
    signal.alarm(30 * timeout)
    resource.setrlimit(resource.RLIMIT_AS, (14 << 30, 14 << 30))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)  # torch writes to it on its own

    def tell(result: dict[str, Any]) -> None:
        os.write(writing, (json.dumps(result) + "\n").encode())

    try:
        steps(name, build, tell)
    except BaseException as error:  # a fork must never come back into the loop
        tell({"eager": "no", "why": f"{type(error).__name__}: {error}"[:400]})
    os._exit(0)


def steps_of(name: str, build: Build, tell: Tell) -> dict[str, Any]:
    """All steps of one family, told one by one, so that a killed process leaves what it had."""
    result: dict[str, Any] = {}
    torch.manual_seed(0)
    try:
        model, inputs, recipe = build(name)
    except Exception as error:
        result |= {"eager": "no", "why": str(error)[-500:]}
        tell(result)
        return result
    result |= {"eager": "yes", "recipe": recipe, "inputs": {k: list(v.shape) for k, v in inputs.items()}}
    tell(result)
    captured = _capture(model, inputs, result)
    tell(result)
    if captured is not None:
        _keep(name, captured, inputs)
        _rewrite(captured, inputs, result)
        tell(result)
    return result


def _capture(model: nn.Module, inputs: dict[str, torch.Tensor], result: dict[str, Any]) -> nn.Module | None:
    started = time.perf_counter()
    try:
        captured = trace(model, on_failure="partial", **inputs)
    except Exception as error:
        result |= {"captured": "no", "partial": "no", "why": str(error)[:700]}
        return None
    if capture_report(captured).parts:
        report = capture_report(captured)
        result |= {"captured": "no", "why": report.attempts[0][:700]}
        result |= {"partial": "yes", "parts": list(report.parts)[:8], "share": report.share}
        return None
    report = capture_report(captured)
    refused = [str(r) for r in report.refused if r.type in MUST]
    result |= {
        "captured": "yes",
        "method": report.method,
        "raised": "yes" if not refused else "no",
        "modules": len(report.raised),
        "refused": refused[:5],
        "kept as ATen": sorted({r.type for r in report.refused if r.type not in MUST}),
        "twins": len(report.split),
        "devices unpinned": report.device_independent,
        "nodes": report.nodes,
        "dynamic": report.dynamic,
        "other batch": _other_batch(report),
        "notes": list(report.notes)[:4],
        "seconds": {k: round(v, 3) for k, v in report.seconds.items()},
        "total seconds": round(time.perf_counter() - started, 2),
        "cpu seconds": round(time.process_time(), 2),
    }
    return captured


def _keep(name: str, captured: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    """With ZOO_KEEP set, captured graphs are stored, so that `--rewrite` need not capture again."""
    folder = os.environ.get("ZOO_KEEP")
    if folder:
        Path(folder).mkdir(exist_ok=True)
        torch.save((captured, inputs), Path(folder) / f"{name}.pt")


def _other_batch(report: Any) -> str:
    if any(0 in dims for dims in report.dynamic.values()):
        return "yes"
    return "no"


def _rewrite(captured: fx.GraphModule, inputs: dict[str, torch.Tensor], result: dict[str, Any]) -> None:
    """The five classic transformations, every rewritten site judged in float64, undone and compared bit for bit."""
    before = _photograph(captured, inputs)
    try:
        for transformation in CLASSIC:
            transformation(captured)
    except Exception as error:
        result |= {"rewritten": "no", "why": f"{type(error).__name__}: {error}"[:400]}
        return
    changes = len(history(captured))
    result |= {"rewritten": "yes", "changes": changes, "verified": "yes", "undone": "no"}
    try:
        verdict = verify_last(captured, inputs, changes, outputs=False) if changes else True
        result |= {"verified": "yes" if verdict else "no"} | ({} if verdict else {"why verify": verdict.sentence[:300]})
    except Exception as error:
        result |= {"verified": "no", "why verify": f"{type(error).__name__}: {error}"[:300]}
    try:
        if changes:
            undo(captured, None)
        why = _unlike(before, _photograph(captured, inputs))
        result |= {"undone": "yes"} if not why else {"undone": "no", "why": why}
    except Exception as error:
        result["why"] = f"{type(error).__name__}: {error}"[:400]


def _photograph(module: fx.GraphModule, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.no_grad():
        outputs = torch.utils._pytree.tree_leaves(module(**{k: v.clone() for k, v in inputs.items()}))
    return {
        "code": module.code,
        "names": [n.name for n in module.graph.nodes],
        "state": {k: v.clone() for k, v in module.state_dict().items()},
        "parameters": {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)},
        "outputs": [o.clone() for o in outputs if isinstance(o, torch.Tensor)],
    }


def _unlike(one: dict[str, Any], other: dict[str, Any]) -> str:
    for key in ("code", "names", "parameters"):
        if one[key] != other[key]:
            return f"{key} differ after undo"
    if list(one["state"]) != list(other["state"]):
        return "state_dict keys differ after undo"
    if not all(_same(v, other["state"][k]) for k, v in one["state"].items()):
        return "weights differ after undo"
    return "" if all(map(_same, one["outputs"], other["outputs"])) else "results differ after undo"


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


if __name__ == "__main__":
    main()
