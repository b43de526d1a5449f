"""Rewrites of sharded models on 2 and 4 ranks (gloo, this machine), beside one process: what is equal, and how nearly.

python benchmarks/scale_ranks.py
"""

import json
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx import GraphModule, symbolic_trace

import refold

sys.path.insert(0, str(Path(__file__).parent))
from models import machine

RESULTS = Path(__file__).parent / "results" / "scale_ranks.json"
SEEDS = range(2)
COLUMNS, ROWS, EVERYWHERE = Shard(0), Shard(1), Replicate()


class Norm(nn.Module):
    """A batch norm behind a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(40, 64), nn.BatchNorm1d(64), nn.Linear(64, 23)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.first(x)).tanh())


class Adapted(nn.Module):
    """A low-rank adapter beside a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.out = nn.Linear(40, 64), nn.Linear(64, 23)
        self.down, self.up = nn.Linear(40, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out((self.base(x) + self.up(self.down(x)) * 0.5).tanh())


class Gated(nn.Module):
    """Two linear layers on one input."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.out = nn.Linear(40, 64), nn.Linear(40, 64), nn.Linear(64, 23)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.silu(self.gate(x)) * self.up(x))


MODELS = {"FoldBatchNorm": Norm, "MergeLora": Adapted, "MergeLinears": Gated}
DIVIDED = {"out.weight": ROWS, "out.bias": EVERYWHERE, "down.weight": EVERYWHERE}
"""How parameters are divided that are not divided by columns."""
FIRST = {"FoldBatchNorm": "first", "MergeLora": "base", "MergeLinears": "gate_up_merged"}
"""The rewritten layer."""
WAYS = ["FSDP2, then rewritten", "rewritten, then FSDP2", "divided, then rewritten", "rewritten, then divided", "DDP"]


def made(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = MODELS[name]().eval()
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm1d)):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return model


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(seed))


def rewriting(name: str, way: str, ranks: int) -> Any:
    blocks = ranks if "divided" in way else 1
    return refold.MergeLinears(shards=blocks) if name == "MergeLinears" else getattr(refold, name)()


def graph(model: nn.Module, way: str, seed: int) -> GraphModule:
    """With shapes where the rewritten layer must be a plain one, so that it can be divided."""
    return refold.trace(model, inputs(seed)) if way == "rewritten, then divided" else symbolic_trace(model)


def sharded(name: str, way: str, seed: int, mesh: DeviceMesh) -> tuple[GraphModule, nn.Module]:
    """The rewritten graph, and what is called."""
    model, rewrite = made(name, seed), rewriting(name, way, mesh.size())
    if way == "divided, then rewritten":
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            owner, _, own = key.rpartition(".")
            place = DIVIDED.get(key, COLUMNS) if tensor.dim() else EVERYWHERE
            value = distribute_tensor(tensor.detach(), mesh, [place])
            setattr(model.get_submodule(owner), own, nn.Parameter(value) if isinstance(tensor, nn.Parameter) else value)
    gm = graph(model, way, seed)
    if way == "FSDP2, then rewritten":
        fully_shard(gm, mesh=mesh)
    rewrite(gm)
    assert len(refold.history(gm)) == 1, refold.result(gm)
    if way == "rewritten, then FSDP2":
        fully_shard(gm, mesh=mesh)
    if way == "rewritten, then divided":
        parallelize_module(gm, mesh, {FIRST[name]: ColwiseParallel(), "out": RowwiseParallel()})
    return gm, nn.parallel.DistributedDataParallel(gm) if way == "DDP" else gm


def checked(name: str, way: str, seed: int, mesh: DeviceMesh) -> dict[str, Any]:
    x, model = inputs(seed), made(name, seed)
    one = rewriting(name, way, mesh.size())(graph(made(name, seed), way, seed))
    exact = made(name, seed).double()(x.double())
    gm, called = sharded(name, way, seed, mesh)
    given = distribute_tensor(x, mesh, [EVERYWHERE]) if way == "divided, then rewritten" else x
    error, own = (float((whole(out).double() - exact).detach().abs().max()) for out in (called(given), one(x)))
    found: dict[str, Any] = {"error": error, "error of one process": own}
    found["checkpoint"] = same(refold.original_state_dict(gm), model.state_dict())
    optimizer = torch.optim.AdamW(resharded(gm).parameters(), lr=0.01)
    for _ in range(2):
        called(given).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    one.load_state_dict({key: whole(tensor) for key, tensor in resharded(gm).state_dict().items()})
    trained = refold.original_state_dict(one)
    found["checkpoint after training"] = same(refold.original_state_dict(gm), trained)
    found["saved and loaded"] = saved_and_loaded(gm, made(name, 9), trained)
    with refold.carry_optimizer(optimizer, gm):
        refold.undo(gm)
    found["undone after training"] = same(resharded(gm).state_dict(), trained)
    rewriting(name, way, mesh.size())(gm)
    refold.load_original_state_dict(gm, model.state_dict())
    refold.undo(gm)
    found["undone"] = same(resharded(gm).state_dict(), model.state_dict())
    return found


def saved_and_loaded(gm: GraphModule, other: nn.Module, wanted: dict[str, torch.Tensor]) -> bool:
    folder = [tempfile.mkdtemp(dir=os.environ["RANKS_FOLDER"]) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(refold.original_state_dict(gm), checkpoint_id=folder[0])
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    return same(state, wanted)


def resharded(gm: Any) -> Any:
    if hasattr(gm, "reshard"):
        gm.reshard()
    return gm


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    if found.keys() != wanted.keys():
        return False
    pairs = [(whole(found[key]), whole(wanted[key])) for key in wanted]  # all ranks gather all
    return all(torch.equal(left, right) for left, right in pairs)


def on_rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["RANKS_FOLDER"] = folder
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", meeting, timedelta(seconds=120), ranks, rank)
    mesh = init_device_mesh("cpu", (ranks,))
    rows = []
    for way in WAYS:
        for name in MODELS:
            cases = [checked(name, way, seed, mesh) for seed in SEEDS]
            row: dict[str, Any] = {"ranks": ranks, "way": way, "rewrite": name, "cases": len(cases)}
            worst = max(cases, key=lambda case: case["error"] / case["error of one process"])
            row |= {key: worst[key] for key in ("error", "error of one process")}
            row |= {key: sum(case[key] for case in cases) for key, value in cases[0].items() if value in (True, False)}
            rows.append(row)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main() -> None:
    rows = []
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            torch.multiprocessing.spawn(on_rank, (ranks, folder), nprocs=ranks)
            rows += json.loads(Path(folder, "rows.json").read_text())
    for row in rows:
        print(json.dumps(row))
    RESULTS.write_text(json.dumps({"rows": rows, "machine": machine("cpu")}, indent=1) + "\n")


if __name__ == "__main__":
    main()
