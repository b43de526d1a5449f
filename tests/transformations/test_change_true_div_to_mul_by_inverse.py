"""ChangeTrueDivToMulByInverse: the constant comes back as it was written; what cannot be inverted is refused."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checking import reasons, rewritten, targets
from torch import nn
from torch.fx import symbolic_trace

import refold
from refold import ChangeTrueDivToMulByInverse
from refold.testing.models import exported


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
