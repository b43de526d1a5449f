"""Code that is not torch's (custom operators, functions of the model's author) is never guessed at: it meets its inputs
laid out as before, and is not taken for an operator of torch by its name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import refold
from refold import (
    ChannelsLast,
    EliminateCommonSubexpressions,
    FuseAttention,
    MergeConvolutions,
    MergeLinears,
    RemoveNoOps,
)
from refold.record.reversal import undo
from refold.record.stack import history
from refold.rewrite.transformation import ReversibleTransformation, Transformation


@torch.library.custom_op("refold_tests::dropout", mutates_args=())
def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Named like an operator of torch that does nothing in eval mode; and a kernel that trusts its input's layout."""
    if not x.is_contiguous():
        raise RuntimeError("this kernel needs contiguous memory")
    return x * 2


@dropout.register_fake
def _(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    return torch.empty_like(x)


def as_operator(x: torch.Tensor) -> torch.Tensor:
    return dropout(x, 0.5, False)


class Operator(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return as_operator(x)


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """An author's function with the name of a method of torch that is often removed."""
    assert x.is_contiguous()
    return x * 2


torch.fx.wrap("contiguous")


def as_function(x: torch.Tensor) -> torch.Tensor:
    return contiguous(x)  # looked up here at every call, where tracing puts its own


READERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"operator": as_operator, "function": as_function}


class Parallel(nn.Module):
    """Two linears whose results go to unknown code: at once, and through a view."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 6), nn.Linear(4, 6)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.q(x)) + self.read(self.k(x).view(2, 5, 3, 2)).flatten(2)


class Twins(nn.Module):
    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.a(x)) + self.read(self.b(x))


class Attention(nn.Module):
    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.read = read
        self.proj = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = k = v = self.proj(x).view(2, -1, 2, 4).transpose(1, 2)
        weights = torch.softmax(q @ k.transpose(-1, -2) / 2, dim=-1)
        return self.read((weights @ v).relu())


class Images(nn.Module):
    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.conv(x).relu())


class Turned(nn.Module):
    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.linear(x).transpose(1, 2).contiguous().relu())


CASES: dict[str, tuple[type[nn.Module], Transformation, tuple[int, ...]]] = {
    "merged linears": (Parallel, MergeLinears(), (2, 5, 4)),
    "merged convolutions": (Twins, MergeConvolutions(), (2, 3, 5, 5)),
    "fused attention": (Attention, FuseAttention(), (2, 5, 8)),
    "channels last": (Images, ChannelsLast(), (2, 3, 8, 8)),
}


def captured(model: nn.Module, x: torch.Tensor, read: str) -> GraphModule:
    """Functions of the author stay whole only where they are traced by classic fx."""
    if read == "operator":
        return refold.trace(model, x)
    gm = torch.fx.symbolic_trace(model)
    FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(x)
    return gm


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("case", CASES)
def test_unknown_code_meets_the_layout_that_it_met_before(case: str, read: str) -> None:
    make, transformation, shape = CASES[case]
    torch.manual_seed(0)
    model, x = make(READERS[read]).eval(), torch.randn(shape)
    gm = captured(model, x, read)
    code = gm.code
    transformation(gm)
    # what a function of the author does to its input is unknown; what an operator writes is in its schema
    assert history(gm) or (read == "function" and "writes" in str(refold.result(gm)))
    with torch.no_grad():
        torch.testing.assert_close(gm(x), model(x))
        again = RemoveNoOps()(gm)
        torch.testing.assert_close(again(x), model(x))
    if history(gm):
        undo(gm, None)
    assert gm.code == code


@pytest.mark.parametrize("read", READERS)
def test_what_makes_memory_contiguous_for_unknown_code_stays(read: str) -> None:
    model, x = Turned(READERS[read]).eval(), torch.randn(2, 5, 4)
    gm = RemoveNoOps()(captured(model, x, read))
    with torch.no_grad():
        assert torch.equal(gm(x), model(x))


def test_an_operator_is_not_taken_for_another_of_its_name() -> None:
    """`refold_tests::dropout` in eval mode doubles; `aten::dropout` would do nothing."""
    model, x = nn.Sequential(nn.Linear(4, 4), Operator()).eval(), torch.randn(2, 4)
    gm = refold.trace(model, x)
    assert any("refold_tests.dropout" in str(node.target) for node in gm.graph.nodes)
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(RemoveNoOps()(gm)(x), expected)
        fast = refold.optimize(model, (x,), backend="plain", progress=False)
        assert torch.equal(fast(x), expected)


def test_merged_linears_before_unknown_code_are_optimized() -> None:
    torch.manual_seed(0)
    model, x = Parallel(as_operator).eval(), torch.randn(2, 5, 4)
    fast = refold.optimize(model, (x,), backend="plain", progress=False)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))


def test_images_of_unknown_shape_are_not_laid_out_otherwise_for_unknown_code() -> None:
    model, x = Images(as_function).eval(), torch.randn(2, 3, 8, 8)
    gm = ChannelsLast()(torch.fx.symbolic_trace(model))
    assert not history(gm) and "unknown code" in str(refold.result(gm))
    with torch.no_grad():
        assert torch.equal(gm(x), model(x))


@torch.library.custom_op("refold_tests::double", mutates_args=("x",))
def double(x: torch.Tensor) -> None:
    x.mul_(2)


def doubled_in_place(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def doubled_by_operator(x: torch.Tensor) -> torch.Tensor:
    torch.ops.refold_tests.double(x)
    return x


torch.fx.wrap("doubled_in_place")


class Twice(nn.Module):
    """The same computed twice, and the first result written into by unknown code in between."""

    def __init__(self, by_operator: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.by_operator = by_operator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.relu(x)
        doubled = doubled_by_operator(first) if self.by_operator else doubled_in_place(first)
        return self.linear(doubled) + torch.relu(x)


@pytest.mark.parametrize("by_operator", [False, True])
def test_unknown_code_may_write_into_its_input(by_operator: bool) -> None:
    model, x = Twice(by_operator).eval(), torch.randn(3, 4)
    gm = EliminateCommonSubexpressions()(torch.fx.symbolic_trace(model))
    with torch.no_grad():
        assert torch.equal(gm(x), model(x))


class LaysOutOtherwise(ReversibleTransformation):
    """Right in every number, but what the next operator gets is not contiguous any more."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        node = next(n for n in graph_module.graph.nodes if n.target == "1")
        node.op, node.target = "call_function", relu_column_by_column
        return graph_module


def relu_column_by_column(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x).t().contiguous().t()


@pytest.mark.parametrize("level", ["default", "safe"])
def test_a_rewritten_model_that_cannot_be_run_is_taken_back(level: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Operator()).eval(), torch.randn(2, 4)
    fast = refold.optimize(model, (x,), backend="plain", pipeline=[LaysOutOtherwise()], level=level, progress=False)  # type: ignore[arg-type]
    (step,) = fast.report.steps
    assert step.status == "taken back" and "cannot be run" in step.note and "needs contiguous memory" in step.note
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
