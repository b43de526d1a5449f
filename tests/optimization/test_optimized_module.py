"""An optimized model is the original in all but speed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from one_way import run_one_way
from torch import nn

from refold.executors import Checked
from refold.optimization.optimized_module import OptimizedModule
from refold.optimization.watch import Watch, read_in_eval

X = torch.randn(3, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4)
        self.act: nn.Module = nn.ReLU()
        self.register_buffer("shift", torch.randn(4))
        self.table, self.tables = torch.randn(4), [torch.randn(4)]
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.act(self.norm(self.first(x))))
        return (self.last(hidden) + self.shift + self.table + self.tables[0]) / self.temperature


class Engine(Checked):
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def run_checked(self, tensors: Any, args: Any, kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def frozen(model: nn.Module) -> OptimizedModule:
    """A model that runs as an engine with copies of the weights runs it."""
    watch = Watch(read_in_eval(model), None, reads_live_weights=False).watch_modules(model)
    return run_one_way(model, X, Engine(copy.deepcopy(model)), watch)


def ran_the_original(fast: OptimizedModule) -> bool:
    return any(note.startswith("ran the original") for note in fast.notes)


# --- being the original --------------------------------------------------------------------------------------------


def test_what_is_set_on_it_is_set_on_the_original() -> None:
    model = Net().eval()
    fast = frozen(model)
    fast.label = "mine"
    assert model.label == "mine" and fast.prepared is not None, "a new attribute makes no difference to what was built"
    fast.temperature = 2.0
    assert model.temperature == 2.0 and torch.equal(fast(X), model(X))
    assert any("temperature was set" in note for note in fast.notes)
    fast.register_buffer("extra", torch.ones(1))
    fast.add_module("more", nn.Linear(1, 1))
    fast.register_parameter("weight", nn.Parameter(torch.ones(1)))
    assert {"extra", "more.weight", "weight"} <= set(model.state_dict()) and fast.more is model.more
    del fast.label
    assert not hasattr(model, "label")


def test_containers_stay_containers_and_others_are_none() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    fast = frozen(model)
    assert fast[0] is model[0] and len(fast) == 2 and list(fast) == list(model) and isinstance(fast, OptimizedModule)
    fast[1] = nn.Tanh()
    assert torch.equal(fast(X), model(X)) and ran_the_original(fast)
    plain = frozen(Net().eval())
    assert not hasattr(plain, "__len__") and bool(plain)


def test_apply_visits_the_original() -> None:
    model, seen = Net().eval(), []
    assert isinstance(frozen(model).apply(seen.append), OptimizedModule)
    assert model in seen and len(seen) == len(list(model.modules()))


class Anchored(Net):
    def to(self, *args: Any, **kwargs: Any) -> Anchored:
        self.table = self.table.to(*args, **kwargs)
        return super().to(*args, **kwargs)


def test_a_model_moves_in_its_own_way() -> None:
    model = Anchored().eval()
    fast = frozen(model)
    assert fast.to(torch.float64) is fast
    assert model.table.dtype == torch.float64 and model.last.weight.dtype == torch.float64
    assert fast(X.double()).dtype == torch.float64 and any("moved or cast" in note for note in fast.notes)


@pytest.mark.parametrize("assign", [False, True])
def test_a_part_of_a_model_loads_with_it(assign: bool) -> None:
    model = nn.Sequential(Net(), nn.Linear(4, 4)).eval()
    other = nn.Sequential(Net(), nn.Linear(4, 4)).eval()
    for part in (model[0], other[0]):
        part.table, part.tables = torch.ones(4), []
        part.tables.append(torch.ones(4))
    model[0] = frozen(model[0])
    model.load_state_dict(other.state_dict(), assign=assign)
    with torch.no_grad():
        assert torch.equal(model(X), other(X))
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*0\.last\.bias.*Unexpected key.*0\.last\.other"):
        wrong = {k.replace("last.bias", "last.other"): v for k, v in other.state_dict().items()}
        model.load_state_dict(wrong)
