"""Transformations as passes of torch's pass manager and of inductor."""

from __future__ import annotations

import copy
import pickle
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace
from torch.fx.passes.infra.pass_base import PassResult
from torch.fx.passes.infra.pass_manager import PassManager

import refold
from refold.extension.torch_passes import as_fx_pass, as_inductor_pass


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.left(x) + self.right(x)) / 8.0


def test_a_pass_says_truly_whether_it_changed_something() -> None:
    gm = symbolic_trace(Branches())
    merge = as_fx_pass(refold.MergeLinears())
    first, second = merge(gm), merge(gm)
    assert isinstance(first, PassResult) and first.graph_module is gm
    assert (first.modified, second.modified) == (True, False)


def test_the_pass_manager_runs_them_and_undo_gives_the_original_back() -> None:
    model = Branches()
    expected, x = copy.deepcopy(model), torch.randn(3, 8)
    gm = symbolic_trace(model)
    code = gm.code
    passes = [as_fx_pass(refold.MergeLinears()), as_fx_pass(refold.ChangeTrueDivToMulByInverse())]
    done = PassManager(passes, steps=5, run_checks_after_each_pass=True)(gm)
    assert done.modified and len(refold.history(done.graph_module)) == 2
    torch.testing.assert_close(done.graph_module(x), expected(x))
    restored = refold.undo(done.graph_module, None)
    assert restored.code == code
    assert torch.equal(restored(x), expected(x))


def test_a_pass_that_copies_is_a_change_of_module() -> None:
    gm = symbolic_trace(Branches())
    done = as_fx_pass(refold.DeepCopy())(gm)
    assert done.graph_module is not gm and done.modified


@pytest.mark.parametrize("adapter", [as_fx_pass, as_inductor_pass])
def test_only_transformations_are_taken(adapter: Any) -> None:
    with pytest.raises(refold.RefoldError, match="the class MergeLinears was given"):
        adapter(refold.MergeLinears)


def test_the_cache_key_is_that_of_the_transformation() -> None:
    keep, correct = refold.FuseBatchNorm2dInConv2d(keep="original"), refold.FuseBatchNorm2dInConv2d()
    assert as_inductor_pass(keep).uuid() == as_inductor_pass(copy.copy(keep)).uuid()
    assert as_inductor_pass(keep).uuid() != as_inductor_pass(correct).uuid()
    assert pickle.loads(pickle.dumps(as_inductor_pass(keep))).uuid() == as_inductor_pass(keep).uuid()


def test_inductor_compiles_the_rewritten_graph() -> None:
    seen: list[str] = []

    @dataclass(frozen=True, kw_only=True, repr=False)
    class Watched(refold.ChangeTrueDivToMulByInverse):
        unlike_any_before: int = time.time_ns()  # else inductor would take what it compiled in an earlier run

        def transform(self, graph_module: GraphModule) -> GraphModule:
            output = super().transform(graph_module)
            seen.append(str(output.graph))
            return output

    model, x = Branches().eval(), torch.randn(2, 8)
    compiled = torch.compile(model, options={"post_grad_custom_pre_pass": as_inductor_pass(Watched())})
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    assert len(seen) == 1
    assert "aten.mul.Tensor" in seen[0] and "aten.div.Tensor" not in seen[0]


def test_a_graph_without_a_module_is_refused() -> None:
    with pytest.raises(refold.RefoldError, match="belongs to a module"):
        as_inductor_pass(refold.ChangeTrueDivToMulByInverse())(Graph())


def test_no_record_stays_on_inductors_graph() -> None:
    gm = symbolic_trace(Branches())
    as_inductor_pass(refold.ChangeTrueDivToMulByInverse())(gm.graph)
    assert "mul" in str(gm.graph) and not refold.history(gm)
