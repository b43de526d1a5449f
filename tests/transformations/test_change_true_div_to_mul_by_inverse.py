"""ChangeTrueDivToMulByInverse: the constant comes back as it was written; what cannot be inverted is refused."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checking import reasons, rewritten, targets
from torch import nn
from torch.fx import symbolic_trace

import refold
from refold import ChangeTrueDivToMulByInverse
from refold.examples import exported


class Divides(nn.Module):
    """Computes a function of its input."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize("constant", [49, 49.0, 3, -7, math.sqrt(192), 0.1, 1e30, 1e-30, 2**60])
def test_the_constant_comes_back_as_it_was_written(constant: float) -> None:
    gm = rewritten(ChangeTrueDivToMulByInverse(), Divides(lambda x: x / constant), torch.randn(3), sites=1)
    ChangeTrueDivToMulByInverse()(gm, reverse=True)
    (division,) = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert division.target is operator.truediv
    assert division.args[1] == constant and type(division.args[1]) is type(constant)


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "/": lambda x: x / 7,
    "operator.truediv": lambda x: operator.truediv(x, 7),
    "torch.div": lambda x: torch.div(x, 7),
    "torch.div(other=)": lambda x: torch.div(x, other=7),
    "torch.divide": lambda x: torch.divide(x, 7),
    "torch.true_divide": lambda x: torch.true_divide(x, 7),
    "x.div": lambda x: x.div(7),
    "x.divide": lambda x: x.divide(7),
    "x.true_divide": lambda x: x.true_divide(7),
    "x.div_": lambda x: (x * 1).div_(7),
    "rounding_mode=None": lambda x: torch.div(x, 7, rounding_mode=None),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_division(form: str) -> None:
    gm = rewritten(ChangeTrueDivToMulByInverse(), Divides(FORMS[form]), torch.randn(3), sites=1)
    assert not any("div" in target for target in targets(gm))


def test_aten() -> None:
    gm = rewritten(
        ChangeTrueDivToMulByInverse(), *exported((Divides(lambda x: x / 7), (torch.randn(3),)))[:1], torch.randn(3)
    )
    assert torch.ops.aten.mul.Tensor in [n.target for n in gm.graph.nodes]


def test_in_place_stays_in_place() -> None:
    gm = symbolic_trace(Divides(lambda x: x.div_(4)))
    ChangeTrueDivToMulByInverse()(gm)
    x = torch.full((3,), 8.0)
    gm(x)
    assert x.tolist() == [2.0, 2.0, 2.0]


def test_integer_inputs_become_floating_point_as_before() -> None:
    gm = rewritten(ChangeTrueDivToMulByInverse(), Divides(lambda x: x / 4), torch.arange(5), sites=1)
    assert torch.equal(gm(torch.arange(5)), torch.arange(5) / 4) and gm(torch.arange(5)).dtype == torch.float32


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "zero": (lambda x: x / 0, "divides by 0"),
    "minus zero": (lambda x: x / -0.0, "divides by -0.0"),
    "infinity": (lambda x: x / math.inf, "divides by inf"),
    "nan": (lambda x: x / math.nan, "divides by nan"),
    "subnormal": (lambda x: x / 1e-310, "not a normal number"),
    "inverse is subnormal": (lambda x: x / 1.5e38, "not a normal number"),
    "floor": (lambda x: torch.div(x, 7, rounding_mode="floor"), "rounds"),
    "trunc": (lambda x: x.div(7, rounding_mode="trunc"), "rounds"),
    "//": (lambda x: x // 7, "rounds"),
    "c / x": (lambda x: 7 / x, "a number is divided by a tensor"),
    "x / y": (lambda x: x / x, "not a constant"),
    "bool": (lambda x: x / True, "not a constant"),
    "sizes": (lambda x: x * (x.size(0) / 2), "sizes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    function, reason = REFUSED[case]
    assert reason in reasons(ChangeTrueDivToMulByInverse(), Divides(function), torch.ones(4) * 3)


def test_powers_of_two_change_no_bit() -> None:
    gm = symbolic_trace(Divides(lambda x: x / 1024))
    ChangeTrueDivToMulByInverse()(gm)
    x = torch.randn(1000)
    assert torch.equal(gm(x), x / 1024)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_with_large_divisors(dtype: torch.dtype) -> None:
    gm = symbolic_trace(Divides(lambda x: x / 1e6))
    x = torch.full((3,), 60000.0, dtype=dtype)
    expected = gm(x)
    ChangeTrueDivToMulByInverse()(gm)
    assert torch.allclose(gm(x), expected, rtol=torch.finfo(dtype).eps, atol=0)


def test_two_rewrites_are_reversed_one_by_one() -> None:
    gm = symbolic_trace(Divides(lambda x: x / 3))
    t = ChangeTrueDivToMulByInverse()
    t(gm)
    refold.commit(gm)
    with pytest.raises(refold.NothingToUndo):
        t(gm, reverse=True)


JUMPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "floor": lambda x: torch.floor(x / 49),
    "the method": lambda x: (x / 49).floor(),
    "ceil behind shapes": lambda x: (x / 49).reshape(-1).unsqueeze(0).ceil(),
    "round behind arithmetic": lambda x: torch.round((x / 49) * 2 + 1),
    "trunc": lambda x: torch.trunc(x / 49),
    "%": lambda x: (x / 49) % 1,
    "//": lambda x: (x / 49) // 1,
    "a comparison": lambda x: x / 49 >= 1,
    "equality": lambda x: torch.eq(x / 49, 1),
    "a mask": lambda x: torch.where(x / 49 < 1, x, -x),
    "a cast": lambda x: (x / 49).to(torch.int64),
    "a named cast": lambda x: (x / 49).long(),
    "an index": lambda x: torch.arange(9.0)[(x / 49).abs().clamp(0, 8).int()],
    "argmax": lambda x: torch.argmax(x / 49),
    "sort": lambda x: torch.sort(x / 49)[1],
    "topk": lambda x: torch.topk(x / 49, 2)[1],
    "bucketize": lambda x: torch.bucketize(x / 49, torch.arange(4.0)),
    "max with places": lambda x: (x / 49).max(dim=0)[1],
    "a module between": lambda x: torch.floor(torch.relu(x / 49)),
    "in place": lambda x: (x / 49).floor_(),
    "a division that rounds": lambda x: torch.div(x / 49, 1, rounding_mode="floor"),
    "a cast by name": lambda x: (x / 49).type("torch.IntTensor"),
    "the type of another": lambda x: (x / 49).type_as(torch.zeros(1, dtype=torch.int32)),
    "copied into integers": lambda x: torch.zeros_like(x, dtype=torch.int64).copy_(x / 49),
    "all": lambda x: (x / 49 - 1).all(),
    "places of a pool": lambda x: F.max_pool1d((x / 49)[None], 2, return_indices=True)[1],
    "the largest of a pool": lambda x: F.max_pool1d((x / 49)[None], 2).floor(),
    "the nearest pixel": lambda x: F.grid_sample(
        x.expand(1, 1, 5, 5), (x / 49)[None, None, :, None].expand(1, 1, 5, 2), "nearest", "zeros", False
    ),
    "a quantization": lambda x: torch.fake_quantize_per_tensor_affine(x / 49, 1.0, 0, 0, 255),
    "unique": lambda x: torch.unique(x / 49),
    "the end of a domain": lambda x: torch.acos(x / 49),
    "a step": lambda x: F.threshold(x / 49, 1.0, -7.0),
}


class Steps(nn.Module):
    """Code of an author, that may do anything with what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.floor()


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Threshold(1.0, 0.0)],
        [nn.GELU(), nn.Hardshrink()],
        [nn.MaxPool1d(2, return_indices=True)],
        [nn.MaxPool1d(2), nn.Threshold(1.0, 0.0)],
        [Steps()],
    ],
)
def test_a_layer_that_jumps_is_given_its_quotient(layers: list[nn.Module]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layers)

        def forward(self, x: torch.Tensor) -> Any:
            y = x / 49
            for layer in self.layers:
                y = layer(y)
            return y

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, Steps) or super().is_leaf_module(m, module_qualified_name)

    gm = torch.fx.GraphModule(model := Model(), Tracer().trace(model))
    ChangeTrueDivToMulByInverse()(gm)
    assert not refold.history(gm)


@pytest.mark.parametrize("as_export", [False, True])
@pytest.mark.parametrize("name", JUMPS)
def test_what_jumps_keeps_its_quotient(name: str, as_export: bool) -> None:
    x = torch.tensor([49.0, 98.0, 147.0, 5.0, 343.0])
    model: nn.Module = Divides(JUMPS[name])
    if as_export:
        model, _ = exported((model, (x,)))
    assert "may jump where it differs by one rounding" in reasons(ChangeTrueDivToMulByInverse(), model, x)


def test_the_example_of_the_promise() -> None:
    gm = ChangeTrueDivToMulByInverse()(symbolic_trace(Divides(lambda x: torch.floor(x / 49))))
    assert gm(torch.tensor(49.0)) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.floor(x / 64),
        lambda x: torch.softmax(x / 49, -1),
        lambda x: torch.floor(torch.nn.functional.linear(x / 49, torch.ones(5, 5))),
        lambda x: torch.tanh(x / 49) + torch.floor(x),
        lambda x: torch.maximum(x / 49, x),
    ],
)
def test_powers_of_two_and_what_does_not_jump_are_rewritten(function: Callable[[torch.Tensor], Any]) -> None:
    rewritten(ChangeTrueDivToMulByInverse(), Divides(function), torch.randn(5), sites=1)
