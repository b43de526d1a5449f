"""Lines that fail, one in each run, there and back: nothing is left behind. benchmarks/faults.py tries every line."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.fx import GraphModule

import refold
from refold import Transformation
from refold.examples import attention_layers, layers
from refold.record.snapshot import Snapshot
from refold.testing import Portrait, check_faults
from refold.testing.faults import Fault, _call_traced, _Lines, executed_lines, of_refold
from refold.testing.laws import graph_of

CLASSIC = [
    refold.MergeLinears(),
    refold.FuseBiasInLinear(),
    refold.ChangeTrueDivToMulByInverse(),
    refold.FuseBatchNorm2dInConv2d(),
    refold.FuseBatchNorm1dInLinear(),
]


@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
@pytest.mark.parametrize("t", CLASSIC, ids=repr)
def test_a_fault_leaves_no_trace(t: Transformation, error: type[BaseException]) -> None:
    model, _ = next(iter(t.examples()))  # type: ignore[attr-defined]
    assert list(check_faults(t, graph_of(model), most=40, error=error)) == []


def test_a_fault_in_a_composition_leaves_no_trace() -> None:
    t = refold.compose(*CLASSIC[:3])
    assert list(check_faults(t, graph_of(attention_layers.attention()[0]), most=40)) == []


class Foreign(Transformation):
    """Somebody else's: raw edits of everything that can be edited."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        softmax = next(n for n in graph.nodes if n.target == "softmax")
        softmax.target = "relu"
        softmax.args = softmax.args[:1]
        with graph.inserting_after(softmax):
            twin = graph.call_function(torch.neg, (softmax,))
        softmax.replace_all_uses_with(twin, delete_user_cb=lambda user: user is not twin)
        graph_module.out = torch.nn.Linear(12, 6)
        graph_module.register_buffer("extra", torch.ones(2), persistent=False)
        graph_module.value.register_forward_hook(lambda module, args, output: output)
        graph_module.value.note = "changed"
        graph_module.train(False)
        graph_module.query.bias = None
        return graph_module


def test_a_fault_in_a_foreign_transformation_leaves_no_trace() -> None:
    gm = graph_of(attention_layers.attention()[0])
    assert list(check_faults(Foreign(), gm, most=60)) == []


class Unsteady(Foreign):
    """One that executes fewer lines in every run, as searches through sets may, and some lines in one run only."""

    runs = 0

    def transform(self, graph_module: GraphModule) -> GraphModule:
        Unsteady.runs += 1
        for _ in range(200 - Unsteady.runs):
            pass
        if Unsteady.runs == 2:  # the run whose lines are counted
            pass
        return super().transform(graph_module)


def test_runs_need_not_be_equally_long(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = graph_of(attention_layers.attention()[0])
    monkeypatch.setattr(Unsteady, "runs", 0)
    assert list(check_faults(Unsteady(), gm, most=40)) == []
    monkeypatch.setattr("refold.record.snapshot.Snapshot.restore", lambda self, gm: None)
    monkeypatch.setattr(Unsteady, "runs", 0)
    assert len(list(check_faults(Unsteady(), gm, most=40))) > 10


def test_a_foreign_transformation_is_undone() -> None:
    gm = graph_of(attention_layers.attention()[0])
    before, held = Portrait.of(gm), [*gm.parameters()]
    Foreign()(gm)
    assert len(gm.value._forward_hooks) == 1 and gm.value.note == "changed"
    refold.undo(gm)
    assert before.differences(Portrait.of(gm), same_objects=True) == [] and held
    assert not gm.value._forward_hooks and not hasattr(gm.value, "note") and gm.query.bias is not None


def test_a_fault_while_a_pickled_module_is_reversed() -> None:
    """Unpickling renames nodes; a reverse first puts the names right, and must take that back too."""
    gm = graph_of(attention_layers.attention()[0])
    before = Portrait.of(gm)
    refold.compose(*CLASSIC[:3])(gm)
    pickled = pickle.dumps(gm)
    total = len(executed_lines(lambda: refold.undo(pickle.loads(pickled), None), of_refold))
    for place in range(0, total, max(1, total // 40)):
        subject = pickle.loads(pickled)
        was = Portrait.of(subject)
        try:
            _call_traced(lambda subject=subject: refold.undo(subject, None), _Lines(of_refold, place, Fault))  # type: ignore[misc]
        except (Fault, refold.GraphEdited):  # a fault while graphs are compared says that they differ
            assert was.differences(Portrait.of(subject), same_objects=True) == []
            refold.undo(subject, None)
        assert before.differences(Portrait.of(subject)) == []


def test_two_interrupts_in_a_row() -> None:
    """The second one comes while the module is being put back."""
    gm = graph_of(layers.gated()[0])
    before = Portrait.of(gm)
    calls = 0
    restore = Snapshot.restore

    def interrupted(self: object, module: GraphModule) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            module.graph.erase_node(next(iter(reversed(module.graph.nodes))))
            raise KeyboardInterrupt
        restore(self, module)

    class Fails(Transformation):
        def transform(self, graph_module: GraphModule) -> GraphModule:
            refold.MergeLinears().transform(graph_module)
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("refold.record.snapshot.Snapshot.restore", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Fails()(gm)
    assert calls == 2 and before.differences(Portrait.of(gm)) == []


def test_out_of_memory_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = graph_of(torch.nn.Sequential(layers.Gated(), layers.Gated()))
    before, held = Portrait.of(gm), [*gm.parameters()]
    cat, calls = torch.cat, []

    def scarce(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("no memory left")
        return cat(*args, **kwargs)  # type: ignore[arg-type, call-overload, no-any-return]

    monkeypatch.setattr(torch, "cat", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        refold.MergeLinears()(gm)
    assert before.differences(Portrait.of(gm), same_objects=True) == [] and held
    assert all(p.untyped_storage().nbytes() == p.numel() * 4 for p in gm.parameters())
