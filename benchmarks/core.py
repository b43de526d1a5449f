"""What the core must reach: linear cost, cheap recording, no second copy of merged weights.

    python benchmarks/core.py            # all three, writes benchmarks/results/core.json
    python benchmarks/core.py memory     # one of: linear, recording, memory

Times are CPU times of this process (other processes do not count), the median of several rounds.
"""

from __future__ import annotations

import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import refold
from refold import (
    ChangeTrueDivToMulByInverse,
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    FuseBiasInLinear,
    MergeLinears,
    ReversibleTransformation,
    Transformation,
)
from refold.record.call_notes import recording as taking_notes

RESULTS = Path(__file__).parent / "results" / "core.json"
SIZES = (1_000, 20_000)
ROUNDS = 3


# --- models of any number of nodes --------------------------------------------------------------------------------


class Repeated(nn.Module):
    """A block many times over."""

    def __init__(self, block: Callable[[], nn.Module], count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Siblings(nn.Module):
    """Many linears on one input."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.layers[0](x)
        for layer in self.layers[1:]:
            total = total + layer(x)
        return total


class Branches(nn.Module):
    """Two linears on one input, their product divided."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.second(x) / 7


def conv_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.ReLU())


def linear_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU())


CASES: dict[str, tuple[Transformation, Callable[[int], nn.Module]]] = {
    "MergeLinears": (MergeLinears(), lambda n: Repeated(Branches, n // 4)),
    "MergeLinears, one input": (MergeLinears(), lambda n: Siblings(n // 2)),
    "FuseBiasInLinear": (FuseBiasInLinear(), lambda n: Repeated(Branches, n // 4)),
    "FuseBiasInLinear, one input": (FuseBiasInLinear(), lambda n: Siblings(n // 2)),
    "ChangeTrueDivToMulByInverse": (ChangeTrueDivToMulByInverse(), lambda n: Repeated(Branches, n // 4)),
    "FuseBatchNorm2dInConv2d": (FuseBatchNorm2dInConv2d(), lambda n: Repeated(conv_norm, n // 3)),
    "FuseBatchNorm1dInLinear": (FuseBatchNorm1dInLinear(), lambda n: Repeated(linear_norm, n // 3)),
}


def graph(make: Callable[[int], nn.Module], size: int) -> GraphModule:
    torch.manual_seed(0)
    return symbolic_trace(make(size).eval())


# --- linear cost --------------------------------------------------------------------------------------------------


def linear() -> dict[str, Any]:
    """Time per node of transform + reverse at 20,000 nodes, as a multiple of that at 1,000; the two take turns, and the
    ratio is taken round by round, so that a machine that drifts does not count."""
    report = {}
    for name, (t, make) in CASES.items():
        graphs = [graph(make, size) for size in SIZES]
        times: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            small = [microseconds_per_node(t, graphs[0]) for _ in range(4)]
            times[0].append(statistics.median(small))
            times[1].append(microseconds_per_node(t, graphs[1]))
        medians = {
            f"µs per node at {size}": round(statistics.median(t), 2) for size, t in zip(SIZES, times, strict=True)
        }
        growth = statistics.median(large / small for small, large in zip(*times, strict=True))
        report[name] = medians | {"growth": round(growth, 3)}
        print(name, report[name], flush=True)
    return report


def microseconds_per_node(t: Transformation, gm: GraphModule) -> float:
    nodes = len(gm.graph.nodes)
    gc.collect()
    gc.disable()  # the collector's own cost grows with everything else that is alive in the process
    start = time.process_time()
    t(gm)
    assert refold.history(gm)
    t(gm, reverse=True) if isinstance(t, ReversibleTransformation) else refold.undo(gm)
    elapsed = time.process_time() - start
    gc.enable()
    return elapsed / nodes * 1e6


# --- the cost of recording ----------------------------------------------------------------------------------------


def recording() -> dict[str, Any]:
    """A call of a transformation against the same edit done raw, with lint and recompile in both; interleaved, and the
    ratio taken round by round, so that a machine that drifts does not count."""
    report = {}
    for name, (t, make) in CASES.items():
        raw: list[float] = []
        recorded: list[float] = []
        rounds = 4 * ROUNDS if _seconds(lambda gm, t=t: _raw(t, gm), graph(make, 2000)) > 0.3 else 14 * ROUNDS
        for round_ in range(rounds):
            turns = [(raw, lambda gm, t=t: _raw(t, gm)), (recorded, lambda gm, t=t: t(gm))]
            for times, work in turns if round_ % 2 else reversed(turns):
                times.append(_seconds(work, graph(make, 2000)))
        overhead = statistics.median(mine / its for mine, its in zip(recorded, raw, strict=True)) - 1
        report[name] = {"overhead": round(overhead, 3), "raw s": _spread(raw), "recorded s": _spread(recorded)}
        print(name, report[name], flush=True)
    return report


def _raw(t: Transformation, gm: GraphModule) -> None:
    with taking_notes():  # as in a call: without, every mark computes the signature anew, and raw would look slow
        t.transform(gm)
    gm.graph.lint()
    gm.recompile()


def _seconds(work: Callable[[GraphModule], object], gm: GraphModule) -> float:
    gc.collect()
    gc.disable()
    start = time.process_time()
    work(gm)
    elapsed = time.process_time() - start
    gc.enable()
    return elapsed


def _spread(times: list[float]) -> dict[str, float]:
    found = {"median": statistics.median(times), "least": min(times), "most": max(times)}
    return {name: round(value, 4) for name, value in found.items()}


# --- memory of merged weights -------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Groups of three large linears of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.groups = nn.ModuleList(
            nn.ModuleList(nn.Linear(256, width, bias=False) for _ in range(3)) for width in (128, 512, 256, 512)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for group in self.groups:
            x = sum(layer(x).mean(-1, keepdim=True) for layer in group) + x
        return x


def memory() -> dict[str, Any]:
    """Bytes of all weights that live in the process: before, at the worst moment, after; merging and reversing."""
    gm = graph(lambda _: Wide(), 0)
    largest = max(sum(p.numel() * 4 for p in group.parameters()) for group in Wide().groups)
    gc.collect()
    with Storages(gm) as storages:
        before = storages.living()
        MergeLinears()(gm)
        peak, merged = storages.peak, storages.living()
        storages.peak = 0
        refold.undo(gm)
        back_peak, back = storages.peak, storages.living()
    return {
        "weights": before,
        "largest group": largest,
        "peak extra while merging": peak - before,
        "extra once merged": merged - before,
        "peak extra while reversing": back_peak - merged,
        "extra once reversed": back - before,
    }


class Storages(TorchDispatchMode):
    """Watches every storage that a module holds or an operator makes, until it is freed."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__()
        self.sizes: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        for parameter in gm.parameters():
            self.note(parameter)

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        self.sizes[reference.cdata] = (reference, storage.nbytes())

    def living(self) -> int:
        """The bytes of those that are not freed yet."""
        self.sizes = {key: entry for key, entry in self.sizes.items() if not entry[0].expired()}
        return sum(size for _, size in self.sizes.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                self.note(leaf)
        self.peak = max(self.peak, self.living())
        return output


def describe() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}


def main() -> None:
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], dict[str, Any]]] = {"linear": linear, "recording": recording, "memory": memory}
    wanted = sys.argv[1:] or list(parts)
    report = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    report["machine"] = describe()
    for name in wanted:
        report[name] = parts[name]()
        print(name, json.dumps(report[name], indent=2, ensure_ascii=False), flush=True)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
