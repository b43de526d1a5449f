"""Which sizes a captured graph takes: asked before a call, answered with the dimension and the line of the model."""

from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import pytest
import torch
from capture_models import Block, seeded
from torch import nn

from refold.capture.captured import why_refused
from refold.capture.tracing import capture_report, trace
from refold.errors import InputMismatch


class Particular(nn.Module):
    """Branches on sizes in its own code and in torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.linear(x)
        if x.shape[1] > 1:
            x = x - x.mean(1, keepdim=True)
        return x * scale, y.reshape(-1, 3).sum(0) if y.shape[0] == 6 else y


@pytest.fixture(scope="module")
def particular() -> nn.Module:
    return trace(Particular().eval(), seeded(2, 5, 4), seeded(6))


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        ((2, 1, 4), (6,), ["x has size 1 in dimension 1", "2 or more", "if x.shape[1] > 1", "test_sizes.py"]),
        ((2, 5, 4), (7,), ["y has size 7 in dimension 0", "size 6 only", "if y.shape[0] == 6", "test_sizes.py"]),
        ((2, 5, 3), (6,), ["x has size 3 in dimension 2", "size 4 only", "x = self.linear(x)"]),
        ((2, 5), (6,), ["x has 2 dimensions"]),
    ],
)
def test_the_reason_names_the_dimension_and_the_line(
    particular: nn.Module, x: tuple[int, ...], y: tuple[int, ...], words: list[str]
) -> None:
    for graph in (particular, pickle.loads(pickle.dumps(particular)), copy.deepcopy(particular)):
        why = why_refused(graph, (seeded(*x), seeded(*y)), {})
        assert why is not None and all(word in why for word in words), why
        with pytest.raises(InputMismatch, match="cannot take"):
            graph(seeded(*x), seeded(*y))


def test_what_it_takes_and_what_no_call_fits(particular: nn.Module) -> None:
    for args, kwargs in (
        ((seeded(2, 5, 4), seeded(6)), {}),
        ((seeded(1, 2, 4),), {"y": seeded(6)}),
        ((seeded(0, 9, 4), seeded(6), 1.0), {}),
    ):
        assert why_refused(particular, args, kwargs) is None
        particular(*args, **kwargs)
    x, y = seeded(2, 5, 4), seeded(6)
    assert "'scale' was 1.0" in str(why_refused(particular, (x, y), {"scale": 2.0}))
    assert "takes the arguments x, y, scale" in str(why_refused(particular, (x,), {}))
    assert "takes the arguments x, y, scale" in str(why_refused(particular, (x, y), {"z": 1}))
    assert "takes the arguments x, y, scale" in str(why_refused(particular, (x, y), {"x": x}))
    assert why_refused(nn.Linear(4, 4), (x,), {}) is None, "it was not captured"


class Named(nn.Module):
    """At sizes 1 and 0 `squeeze` and `view` do something else."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.kind == "view":
            return x.view(x.shape[0], -1, 2)  # of nothing, -1 could be any size
        return x.squeeze(0) if self.kind == "squeeze" else x


@pytest.mark.parametrize(("kind", "refused"), [("plain", set()), ("view", {0}), ("squeeze", set())])
def test_sizes_one_and_zero_are_compared_too(kind: str, refused: set[int]) -> None:
    model = Named(kind).eval()
    graph = trace(model, seeded(3, 5, 4))
    for rows in (0, 1, 2, 7):
        x = seeded(rows, 5, 4)
        assert (why_refused(graph, (x,), {}) is not None) == (rows in refused), f"{rows} rows"
        assert rows in refused or torch.equal(graph(x), model(x)), f"{rows} rows"
    said = "x.shape[0]: 1 or more: at size 0 the model itself fails" in str(capture_report(graph))
    assert said == (kind == "view")


def test_fixed_sizes_say_who_fixed_them() -> None:
    x = seeded(2, 4)
    fixed = trace(Block().eval(), x, dynamic=False)
    assert "dynamic=False" in str(why_refused(fixed, (seeded(3, 4),), {}))
    given = trace(Block().eval(), x, dynamic={"x": {0: torch.export.Dim("batch")}})
    assert why_refused(given, (seeded(3, 4),), {}) is None
    image = trace(nn.Conv2d(3, 4, 3).eval(), seeded(2, 3, 8, 8))
    assert "heights and widths of images" in str(why_refused(image, (seeded(2, 3, 9, 8),), {}))


def test_asking_is_quick() -> None:
    class Many(nn.Module):
        def forward(self, a: Any, b: Any, c: Any, d: Any = None) -> torch.Tensor:
            return a + b * c if a.shape[1] > 2 else a

    tensors = (seeded(2, 8), seeded(2, 8), seeded(2, 8))
    graph = trace(Many().eval(), *tensors)
    spent = []
    for _ in range(200):
        begun = time.perf_counter()
        assert why_refused(graph, tensors, {}) is None
        spent.append(time.perf_counter() - begun)
    assert sorted(spent)[20] < 20e-6
