"""What is checked on every rank at once; `test_ranks.py` runs it. One process imports and captures what all use, and is
forked for each rank. A failure on one rank ends them all.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx import symbolic_trace

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from sharded_models import (  # noqa: E402
    assert_close,
    assert_same,
    assert_same_objects,
    by_columns_and_rows,
    divided,
    everything,
    gated,
    images,
    rewrites,
    rows,
    whole,
)

import refold  # noqa: E402
from refold.errors import CaptureError, RefoldError, SaveError, WeightsChanged  # noqa: E402
from refold.examples.padded_batches import classifier  # noqa: E402
from refold.rewrite.registry import registered  # noqa: E402
from refold.rewrite.rule import Rewrite  # noqa: E402
from refold.testing.equivalence import as_copies  # noqa: E402
from refold.testing.laws import graph_of  # noqa: E402
from refold.weights import (  # noqa: E402
    AddLowRank,
    AppendColumn,
    Concatenate,
    ConcatenateBlocks,
    FoldBatchNormInLayer,
    Pad,
    Permute,
    Rename,
    Reshape,
    Scale,
    Slice,
    Transpose,
)
from refold.weights.maps import WeightMap, apply_map  # noqa: E402

# --- maps ----------------------------------------------------------------------------------------------------------

MATRIX = {"weight": (5, 6)}
NORM = {"gamma": (5,), "beta": (5,), "running_mean": (5,), "running_var": (5,)}
MAPS: list[tuple[Any, dict[str, tuple[int, ...]], tuple[int, ...]]] = [
    (Rename(), MATRIX, (0, 1)),
    (Transpose(), MATRIX, (0, 1)),
    (Permute((1, 0)), MATRIX, (0, 1)),
    (Pad(3, 1), MATRIX, (0,)),
    (Reshape((5, 6), (30,)), MATRIX, ()),
    (AppendColumn(), MATRIX | {"bias": (5,)}, (0,)),
    (Slice((2, 4), 1), {"whole": (5, 6)}, (0,)),
    (Concatenate((5, 3)), {"0": (5, 6), "1": (3, 6)}, (1,)),
    (ConcatenateBlocks((8, 4), 0, 4), {"0": (8, 6), "1": (4, 6)}, (0, 1)),
    (Scale(0), MATRIX | {"scale": (5,)}, (0, 1)),
    (Scale(1, -1), MATRIX | {"scale": (6,)}, (0, 1)),
    (AddLowRank(0.7), MATRIX | {"a": (2, 6), "b": (5, 2)}, (0, 1)),
    (FoldBatchNormInLayer(1e-5, 0), MATRIX | {"bias": (5,)} | NORM, (0, 1)),
    (FoldBatchNormInLayer(1e-5, 1, "norm"), {"weight": (4, 5), "bias": (4,)} | NORM, (0,)),
]
"""Operations, the shapes of their sources, and along which axes of the weight they need nothing of other ranks."""


def check_maps(mesh: DeviceMesh) -> None:
    for operation, shapes, local in MAPS:
        for axis in (None, 0, 1):
            _check_map(mesh, operation, shapes, axis, axis is None or axis in local)


def _check_map(mesh: DeviceMesh, operation: Any, shapes: dict[str, Any], axis: int | None, is_local: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    old = {role: torch.rand(shape, generator=generator) + 0.5 for role, shape in shapes.items()}
    names = {role: role for role in old}
    weight_map = WeightMap(operation, names, {role: f"new {role}" for role in operation.forward(old)})
    new, one = apply_map(weight_map, old)
    sharded = {r: distribute_tensor(t, mesh, _placements(operation, axis, r, t)) for r, t in old.items()}
    with CommDebugMode() as forward:
        found, record = apply_map(weight_map, sharded)
    with CommDebugMode() as back:
        again = record.recover(found)
    counts = [mode.get_comm_counts().items() for mode in (forward, back)]
    gathers = [sum(n for call, n in found if "gather" in str(call)) for found in counts]
    assert (gathers == [0, 0]) == is_local, f"{operation} along axis {axis}: {gathers} tensors were gathered"
    assert_same(found, new)
    assert_same(again, old)
    assert all(again[role].placements == sharded[role].placements for role in again)
    changed = {role: tensor + (tensor > 0.9) * 0.01 for role, tensor in new.items()}
    placed = {role: distribute_tensor(tensor, mesh, found[role].placements) for role, tensor in changed.items()}
    wanted = one.recover(changed)
    assert_same(record.recover(placed), wanted)
    assert_same(one.recover(placed), wanted)  # sharded after the map was applied


def _placements(operation: Any, axis: int | None, role: str, tensor: torch.Tensor) -> list[Any]:
    """Vectors lie with that axis of the weight which they run along, and whole where it is not cut."""
    along = axis
    if role in ("b", "bias", "a"):
        along = axis if (role == "a") == (axis == 1) else None
    elif role in NORM or role == "scale":
        along = 0 if axis == operation.channel else None
    return [Replicate() if along is None or along >= tensor.dim() else Shard(along)]


# --- FSDP2 ---------------------------------------------------------------------------------------------------------


def check_fsdp_before_rewriting(mesh: DeviceMesh) -> None:
    _rewrite_and_undo_under_fsdp(mesh)


def _rewrite_and_undo_under_fsdp(mesh: DeviceMesh) -> None:
    model, image = everything(), images()
    one = rewrites()(symbolic_trace(everything()))
    gm = symbolic_trace(everything())
    fully_shard(gm, mesh=mesh)
    before = dict(gm.named_parameters())
    rewrites()(gm)
    assert len(refold.history(gm)) == 3
    assert_same(gm.state_dict(), one.state_dict())
    assert_close(gm(image), model(image))
    original = refold.original_state_dict(gm)
    assert_same(original, model.state_dict())
    assert all(original[name].placements == tensor.placements for name, tensor in before.items())
    refold.undo(gm, None)
    assert_same_objects(gm, before)
    assert_close(gm(image), model(image))
    assert_same(gm.state_dict(), model.state_dict())


def check_fsdp_after_rewriting(mesh: DeviceMesh) -> None:
    model, image = everything(), images()
    gm = rewrites()(symbolic_trace(everything()))
    fully_shard(gm, mesh=mesh)
    assert_close(gm(image), model(image))
    original = refold.original_state_dict(gm)
    assert_same(original, model.state_dict())
    assert all(isinstance(original[name], DTensor) for name, _ in model.named_parameters())
    assert not isinstance(original["norm.running_mean"], DTensor)
    refold.undo(gm, None)
    assert_close(gm(image), model(image))
    assert_same(gm.state_dict(), model.state_dict())
    assert all(isinstance(parameter, DTensor) for parameter in _sharded(gm))


def _sharded(gm: Any) -> list[nn.Parameter]:
    gm.reshard()
    return list(gm.parameters())


def check_fsdp_training(mesh: DeviceMesh) -> None:
    """Trained while folded, undone, and trained on: as one process does, in float64."""
    found = []
    for sharded in (True, False):
        gm, image = rewrites()(symbolic_trace(everything())).double(), images().double()
        if sharded:
            fully_shard(gm, mesh=mesh)
        optimizer = torch.optim.AdamW(_sharded(gm) if sharded else gm.parameters(), lr=0.01)
        _train(gm, image, optimizer)
        with refold.carry_optimizer(optimizer, gm):
            refold.undo(gm)  # the merged layers
        _train(gm, image, optimizer)
        with refold.carry_optimizer(optimizer, gm):
            refold.MergeLinears()(gm)
        _train(gm, image, optimizer)
        if sharded:
            gm.reshard()
            exact = refold.original_state_dict(gm)
            weights = whole(gm.state_dict())
        else:
            with torch.no_grad():
                assert all(float((v - weights[k]).abs().max()) < 1e-10 for k, v in gm.state_dict().items())
                gm.load_state_dict(weights)
            assert_same(refold.original_state_dict(gm), exact)  # the very bits, from the same folded weights
        found.append(whole(refold.original_state_dict(gm)))


def _train(gm: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        gm(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def check_gradients(mesh: DeviceMesh) -> None:
    """Gradients go into the rewritten layers and back out of them, as in one process."""
    found = []
    for sharded in (True, False):
        gm, image = symbolic_trace(everything()).double(), images().double()
        if sharded:
            fully_shard(gm, mesh=mesh)
        gm(image).square().sum().backward()
        rewrites()(gm)
        inside = whole({n: p.grad for n, p in gm.named_parameters() if p.grad is not None})
        gm.zero_grad()
        gm(image).square().sum().backward()
        refold.undo(gm, None)
        outside = whole({n: p.grad for n, p in gm.named_parameters() if p.grad is not None})
        found.append({f"{side} {n}": g for side, grads in (("in", inside), ("out", outside)) for n, g in grads.items()})
    mine, wanted = found
    assert mine.keys() == wanted.keys() and len(mine) > 10
    assert all(float((mine[name] - wanted[name]).abs().max()) < 1e-10 for name in wanted)


def check_groups(mesh: DeviceMesh) -> None:
    """Several groups of layers: trained, loaded and saved; what FSDP cannot take out is not undone."""
    x, model = rows(), gated()
    gm = refold.MergeLinears()(refold.trace(gated(), x))
    fully_shard([gm.gate_up_merged, gm.out], mesh=mesh)
    fully_shard(gm, mesh=mesh)
    assert_close(gm(x), model(x))
    _train(gm, x, torch.optim.AdamW(gm.parameters(), lr=0.01))
    trained = gated()
    trained.load_state_dict(whole(refold.original_state_dict(gm)))
    assert_close(gm(x), trained(x))
    with pytest.raises(RefoldError, match="gate_up_merged was given to fully_shard by itself"):
        refold.undo(gm)
    refold.load_original_state_dict(gm, model.state_dict())
    assert_close(gm(x), model(x))


def check_ties(mesh: DeviceMesh) -> None:
    x, model = rows(), nn.Sequential(gated(), gated())
    model[1].out.weight = model[0].out.weight
    wanted = model(x).detach()
    gm = symbolic_trace(model)
    fully_shard(gm, mesh=mesh)
    before = dict(gm.named_parameters())
    gm(x)
    refold.MergeLinears()(gm)
    assert len(refold.history(gm)) == 1
    assert_close(gm(x).detach(), wanted)
    refold.undo(gm)
    assert_same_objects(gm, before)
    assert gm.get_parameter("1.out.weight") is gm.get_parameter("0.out.weight")
    gm(x).sum().backward()
    assert_close(gm(x).detach(), wanted)


def check_changes_on_one_rank(mesh: DeviceMesh) -> None:
    """Only the first rank's shards are changed; all ranks carry that back alike, or all refuse."""
    gm, one = symbolic_trace(everything()), rewrites()(symbolic_trace(everything()))
    fully_shard(gm, mesh=mesh)
    rewrites()(gm)
    with torch.no_grad():
        for parameter in gm.parameters():
            local = parameter.to_local()
            if dist.get_rank() == 0 and local.numel():
                local.view(-1)[0] += 1
        one.load_state_dict(whole(gm.state_dict()))
    wanted = refold.original_state_dict(one)
    assert_same(refold.original_state_dict(gm), wanted)
    refold.undo(gm, None)
    assert_same(gm.state_dict(), wanted)


def check_refusals_agree(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4)).eval()
    nn.init.zeros_(model[1].weight[:1])  # type: ignore[index]
    gm = symbolic_trace(model)
    fully_shard(gm, mesh=mesh)
    before, values = dict(gm.named_parameters()), whole(gm.state_dict())
    refold.FoldBatchNorm()(gm)
    with torch.no_grad():
        gm.get_parameter("0.weight").to_local().add_(float(dist.get_rank() == 0))
    with pytest.raises(WeightsChanged) as caught:
        refold.undo(gm)
    assert ("has a scale of 0" if dist.get_rank() == 0 else "another rank says why") in str(caught.value)
    refold.undo(gm, weights="original")  # the model holds them
    assert_same_objects(gm, before)
    assert_same(gm.state_dict(), values)


def check_interrupts(mesh: DeviceMesh) -> None:
    """What is raised half-way leaves the graph and FSDP as they were."""

    class Interrupted(refold.Transformation):
        def transform(self, graph_module: Any) -> Any:
            rewrites()(graph_module)
            raise KeyboardInterrupt

    gm, image = symbolic_trace(everything()), images()
    fully_shard(gm, mesh=mesh)
    before = dict(gm.named_parameters())
    with pytest.raises(KeyboardInterrupt):
        Interrupted()(gm)
    assert_same_objects(gm, before)
    assert_close(gm(image), everything()(image))


def check_loading_and_checkpoints(mesh: DeviceMesh) -> None:
    """A checkpoint of the original, whole or sharded, goes in; DCP writes and reads what comes out."""
    gm, other, image = symbolic_trace(everything()), everything(3), images()
    fully_shard(gm, mesh=mesh)
    rewrites()(gm)
    refold.load_original_state_dict(gm, other.state_dict())
    assert_same(refold.original_state_dict(gm), other.state_dict())
    assert_close(gm(image), other(image))
    folder = _shared_folder()
    dcp.save(refold.original_state_dict(gm), checkpoint_id=folder)
    plain = everything(5).state_dict()
    dcp.load(plain, checkpoint_id=folder)
    assert_same(plain, other.state_dict())
    again = rewrites()(symbolic_trace(everything(5)))
    fully_shard(again, mesh=mesh)
    state = refold.original_state_dict(again)
    dcp.load(state, checkpoint_id=folder)
    refold.load_original_state_dict(again, state)
    assert_same(again.state_dict(), gm.state_dict())
    refold.undo(again, None)
    assert_same(again.state_dict(), other.state_dict())


def check_meta_device(mesh: DeviceMesh) -> None:
    """Captured, rewritten and sharded without a weight, in both orders; then a checkpoint is loaded."""
    wanted, image = everything(), images()
    for rewritten_first in (True, False):
        with torch.device("meta"):
            gm = refold.trace(everything(), torch.empty(image.shape))
        if rewritten_first:
            rewrites()(gm)
        fully_shard(gm, mesh=mesh)
        if not rewritten_first:
            rewrites()(gm)
        refold.undo(gm, None)
        assert all(isinstance(p, DTensor) and p.is_meta for p in gm.parameters())
        rewrites()(gm)
        assert len(refold.history(gm)) == 3
        gm.to_empty(device="cpu")
        refold.load_original_state_dict(gm, wanted.state_dict())
        assert_close(gm(image), wanted(image))
        refold.undo(gm, None)
        assert_same(gm.state_dict(), wanted.state_dict())


def _shared_folder() -> str:
    found = [tempfile.mkdtemp(dir=os.environ["CHECKS_FOLDER"]) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return str(found[0])


# --- tensor parallelism --------------------------------------------------------------------------------------------


def check_divided_columns(mesh: DeviceMesh) -> None:
    """Weights that are DTensors already are merged, run, trained and undone where they lie."""
    x, model = rows(), gated()
    spread = distribute_tensor(x, mesh, [Replicate()])
    gm = divided(gated(), mesh, by_columns_and_rows)
    before = dict(gm.named_parameters())
    with CommDebugMode() as counted:
        refold.MergeLinears()(gm)
        original = refold.original_state_dict(gm)
        copied = copy.deepcopy(gm)
        stored = pickle.loads(pickle.dumps(gm))
        for other in (copied, stored, gm):
            refold.undo(other)
    assert not counted.get_total_counts()
    assert_same(original, model.state_dict())
    assert_same_objects(gm, before)
    assert all(copied.get_parameter(name).placements == tensor.placements for name, tensor in before.items())
    assert_same(stored.state_dict(), model.state_dict())
    refold.MergeLinears()(gm)
    with CommDebugMode() as counted:
        outputs = gm(spread)
    assert not counted.get_total_counts()  # the output is a sum that nobody has asked for yet
    assert_close(outputs, model(x))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (gm, model)]
    _train(gm, spread, optimizers[0])
    _train(model, x, optimizers[1])
    with refold.carry_optimizer(optimizers[0], gm):
        refold.undo(gm)
    for name, wanted in model.named_parameters():
        parameter = gm.get_parameter(name)
        assert parameter.placements == before[name].placements
        assert_close(parameter, wanted)
        assert_close(optimizers[0].state[parameter]["momentum_buffer"], optimizers[1].state[wanted]["momentum_buffer"])


def check_dividing_a_merged_layer(mesh: DeviceMesh) -> None:
    x, model, ranks = rows(), gated(), mesh.size()
    gm = refold.MergeLinears(shards=ranks)(symbolic_trace(gated()))
    plan = {"gate_up_merged": ColwiseParallel(), "out": RowwiseParallel()}
    parallelize_module(gm, mesh, plan)
    assert_close(gm(x), model(x))
    assert_same(refold.original_state_dict(gm), model.state_dict())
    refold.undo(gm)
    assert_same(gm.state_dict(), model.state_dict())
    assert [tuple(gm.get_parameter(f"{layer}.weight").placements) for layer in ("gate", "out")] == [
        (Shard(0),),
        (Shard(1),),
    ]


def check_layers_left_alone(mesh: DeviceMesh) -> None:
    uneven = refold.MergeLinears()(divided(gated(9), mesh, lambda name: [Shard(0)]))
    assert "cannot be divided evenly" in str(refold.result(uneven))
    model = gated()
    parallelize_module(model, mesh, {"gate": ColwiseParallel(), "up": ColwiseParallel(), "out": RowwiseParallel()})
    hooked = refold.MergeLinears()(symbolic_trace(model))
    assert "hooks are registered on it (as parallelize_module does" in str(refold.result(hooked))
    single = symbolic_trace(gated())
    fully_shard(single.gate, mesh=mesh)
    assert "given to fully_shard by itself" in str(refold.result(refold.MergeLinears()(single)))


def check_what_needs_whole_weights(mesh: DeviceMesh) -> None:
    gm, image = symbolic_trace(everything()), images()
    fully_shard(gm, mesh=mesh)
    rewrites()(gm)
    tensors = divided(gated(), mesh, by_columns_and_rows)
    for refused, error in (
        (lambda: refold.trace(gm, image), CaptureError),
        (lambda: refold.trace(tensors, rows()), CaptureError),
        (lambda: refold.optimize(gm, (image,)), RefoldError),
        (lambda: refold.verify(gm, (image,)), RefoldError),
        (lambda: refold.save(gm, os.path.join(os.environ["CHECKS_FOLDER"], "never")), SaveError),
    ):
        with pytest.raises(error, match="is sharded, and"):
            refused()


# --- DDP, and padding ----------------------------------------------------------------------------------------------


def check_ddp(mesh: DeviceMesh) -> None:
    model, x = gated(), rows()
    gm = refold.MergeLinears()(symbolic_trace(gated()))
    parallel = nn.parallel.DistributedDataParallel(gm)
    parallel(x + dist.get_rank()).square().sum().backward()
    for rank in range(mesh.size()):
        (model(x + rank).square().sum() / mesh.size()).backward()
    assert_same(refold.original_state_dict(gm), model.state_dict())
    refold.undo(gm)
    for name, wanted in model.named_parameters():
        scale = float(wanted.grad.abs().max())  # type: ignore[union-attr]
        assert_close(gm.get_parameter(name).grad / scale, wanted.grad / scale)  # type: ignore[operator]


@functools.cache
def _captured_classifier() -> nn.Module:
    return classifier()[0]


def check_padding(mesh: DeviceMesh) -> None:
    """Ranks with different numbers of real tokens: gradients as near to float64's as in the padded run."""
    batches = [_batch(rank) for rank in range(mesh.size())]
    reference = copy.deepcopy(_captured_classifier())
    reference.double()
    sum(_loss(reference, *batch) for batch in batches).div(mesh.size()).backward()  # type: ignore[union-attr]
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}

    def error(how: str) -> float:
        gm = copy.deepcopy(_captured_classifier())
        if how in ("packed, then fsdp", "packed, then ddp"):
            refold.RemovePadding()(gm)
        parallel: nn.Module = gm
        if "fsdp" in how:
            fully_shard(gm, mesh=mesh)
        else:
            parallel = nn.parallel.DistributedDataParallel(gm)
        if how == "fsdp, then packed":
            refold.RemovePadding()(gm)
        assert len(refold.history(gm)) == ("packed" in how)
        _loss(parallel, *batches[dist.get_rank()]).backward()
        found = whole({name: parameter.grad for name, parameter in gm.named_parameters()})
        return max(float((found[n].double() - w).abs().max() / w.abs().max()) for n, w in wanted.items())

    own = error("fsdp")
    for how in ("packed, then fsdp", "fsdp, then packed", "packed, then ddp"):
        assert error(how) <= 4 * own, f"{how}: further from float64 than the padded run"


def _batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = [[[7], [2], [4]], [[1], [3], [2]], [[7], [7], [1]], [[2], [2], [2]]][rank]
    ids = torch.randint(0, 16, (3, 7), generator=torch.Generator().manual_seed(rank))
    return ids, (torch.arange(7) < torch.tensor(lengths)).long()


def _loss(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(ids, mask).square().sum()
    return loss


# --- every rule ----------------------------------------------------------------------------------------------------


@functools.cache
def _examples() -> list[tuple[type[Rewrite], nn.Module, tuple[Any, ...], dict[str, nn.Parameter]]]:
    """The examples of every rule, and the parameters that one process rewrites them to."""
    rules = [cls for cls in registered() if issubclass(cls, Rewrite) and cls.__module__.startswith("refold.")]
    examples = [(rule, *example) for rule in rules for example in rule.examples()]
    sharded = [each for each in examples if any(tensor.dim() for tensor in each[1].parameters())]
    return [(rule, m, inputs, dict(_rewritten(rule, m).named_parameters())) for rule, m, inputs in sharded]


def _rewritten(rule: type[Rewrite], model: nn.Module) -> nn.Module:
    return rule()(graph_of(copy.deepcopy(model)))


def check_every_rule(mesh: DeviceMesh) -> None:
    """On graphs that FSDP shards and that have run: the bits of one process, and the same objects back."""
    fired = set()
    for rule, model, inputs, wanted in _examples():
        gm = graph_of(copy.deepcopy(model))
        fully_shard(gm, mesh=mesh)
        before = dict(gm.named_parameters())
        gm(*as_copies(inputs))
        rule()(gm)
        if rule is refold.ChannelsLast:
            assert "its weight is sharded" in str(refold.result(gm))
            continue
        fired.add(rule.__name__)
        assert_same(dict(gm.named_parameters()), wanted)
        gm(*as_copies(inputs))
        refold.undo(gm)
        assert_same_objects(gm, before)
        gm(*as_copies(inputs))
    assert len(fired) >= 15


# --- meshes of two dimensions --------------------------------------------------------------------------------------


def check_hsdp(mesh: DeviceMesh) -> None:
    _rewrite_and_undo_under_fsdp(init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))


def check_fsdp_and_tensor_parallelism(mesh: DeviceMesh) -> None:
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    x, model = rows(), gated()
    gm = refold.MergeLinears(shards=2)(symbolic_trace(gated()))
    parallelize_module(gm, both["model"], {"gate_up_merged": ColwiseParallel(), "out": RowwiseParallel()})
    fully_shard(gm, mesh=both["data"])
    assert_close(gm(x), model(x))
    _train(gm, x, torch.optim.AdamW(_sharded(gm), lr=0.01))
    trained = gated()
    trained.load_state_dict(whole(refold.original_state_dict(gm)))
    assert_close(gm(x), trained(x))
    refold.load_original_state_dict(gm, model.state_dict())
    assert_same(refold.original_state_dict(gm), model.state_dict())
    before = dict(gm.named_parameters())
    with pytest.raises(RefoldError, match="by FSDP and by tensor parallelism at once"):
        refold.undo(gm)
    assert_same_objects(gm, before)


def check_shards_of_shards(mesh: DeviceMesh) -> None:
    both, x, model = init_device_mesh("cpu", (2, 2)), rows(), gated()
    gm = divided(gated(), both, lambda name: [Shard(0), Shard(0)] if name[0] in "gu" else [Replicate(), Replicate()])
    before = dict(gm.named_parameters())
    refold.MergeLinears()(gm)
    assert_close(gm(distribute_tensor(x, both, [Replicate(), Replicate()])), model(x))
    refold.undo(gm)
    assert_same_objects(gm, before)
    assert_same(gm.state_dict(), model.state_dict())


# --- all of them ---------------------------------------------------------------------------------------------------

Check = Callable[[DeviceMesh], None]
ON_ANY_NUMBER: list[Check] = [
    check_maps,
    check_fsdp_before_rewriting,
    check_fsdp_after_rewriting,
    check_fsdp_training,
    check_gradients,
    check_groups,
    check_ties,
    check_changes_on_one_rank,
    check_refusals_agree,
    check_interrupts,
    check_loading_and_checkpoints,
    check_meta_device,
    check_divided_columns,
    check_dividing_a_merged_layer,
    check_layers_left_alone,
    check_what_needs_whole_weights,
    check_ddp,
    check_padding,
]
ON_FOUR: list[Check] = [check_every_rule, check_hsdp, check_fsdp_and_tensor_parallelism, check_shards_of_shards]


def run_on_rank(rank: int, ranks: int, folder: str) -> None:
    """What each process does; its log in the folder names the checks that passed."""
    os.environ["CHECKS_FOLDER"] = folder
    torch.set_num_threads(1)
    meeting, patience = f"file://{folder}/meeting", timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=patience)
    mesh = init_device_mesh("cpu", (ranks,))
    for check in [*ON_ANY_NUMBER, *(ON_FOUR if ranks == 4 else ())]:
        check(mesh)
        with open(f"{folder}/passed.{rank}", "a", encoding="utf-8") as log:
            log.write(f"{check.__name__}\n")
    dist.destroy_process_group()


def main(ranks: int, folder: str) -> None:
    """Run the checks on so many ranks."""
    torch.set_num_threads(1)  # other threads would not be there in a forked process
    _captured_classifier()
    if ranks == 4:
        _examples()
    torch.multiprocessing.start_processes(run_on_rank, (ranks, folder), nprocs=ranks, start_method="fork")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
