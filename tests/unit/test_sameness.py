"""An optimized model never computes as its original did before it was altered, and is the original in all but speed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import refold
from refold.executors import Checked, Signature
from refold.executors.beside import ask_beside
from refold.optimizing.freshness import Freshness, read_in_eval
from refold.optimizing.optimized import OptimizedModule
from refold.optimizing.sameness import Sameness
from refold.optimizing.variant import Variant
from refold.report.data import ModelSummary, Report

X = torch.randn(3, 4)


class Switched(nn.Module):
    """Plain attributes say what it does, as those of adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled, self.merged, self.scaling, self.function = False, [], {"this": 1.0}, torch.relu
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.function(x - 0.5) * self.scaling["this"]
        return x + 1 if self.enabled else x + len(self.merged)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4)
        self.act: nn.Module = nn.ReLU()
        self.register_buffer("shift", torch.randn(4))
        self.table, self.tables = torch.randn(4), [torch.randn(4)]
        self.temperature = 1.0
        self.switched = Switched()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.switched(self.drop(self.act(self.norm(self.first(x)))))
        return (self.last(hidden) + self.shift + self.table + self.tables[0]) / self.temperature


class Engine(Checked):
    asks_beside = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def run_checked(self, tensors: Any, args: Any, kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def run_while(self, look: Any, tensors: Any, args: Any, kwargs: Any) -> Any:
        ask = ask_beside(look).answer if self.asks_beside else look
        return self.run_checked(tensors, args, kwargs), ask()


def frozen(model: nn.Module, reoptimize: Any = None) -> OptimizedModule:
    """A model that runs as an engine with copies of the weights runs it."""
    freshness = Freshness(read_in_eval(model), None, follows=False)
    report = Report("frozen", ModelSummary("model"))
    engine = Engine(copy.deepcopy(model))
    sameness = Sameness(model, written={"switched.calls"})
    variant = Variant(Signature.of((X,), {}), None, engine, "engine", freshness, report, sameness=sameness)
    return OptimizedModule(model, variant, reoptimize)


def ran_the_original(fast: OptimizedModule) -> bool:
    return any(note.startswith("ran the original") for note in fast.notes)


def step_fused(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(X).sum().backward()
    optimizer.step()


def write(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


ALTERATIONS: dict[str, Callable[[Any], Any]] = {
    "a parameter is replaced": lambda m: setattr(m.last, "weight", nn.Parameter(torch.ones(4, 4))),
    "a buffer is replaced": lambda m: setattr(m, "shift", torch.ones(4)),
    "a module is replaced": lambda m: setattr(m, "act", nn.Tanh()),
    "a deep module is replaced": lambda m: setattr(m, "last", nn.Sequential(nn.Linear(4, 4))),
    "a parameter is reparametrized": lambda m: nn.utils.parametrizations.weight_norm(m.last),
    "a checkpoint is assigned": lambda m: m.load_state_dict(Net().state_dict(), assign=True),
    "a tensor that is no buffer is written": lambda m: write(m.table),
    "a tensor in a list is written": lambda m: write(m.tables[0]),
    "a fused optimizer steps": step_fused,
    "a part trains": lambda m: m.norm.train(),
    "everything is cast": lambda m: m.double(),
    "a number is set": lambda m: setattr(m, "temperature", 2.0),
    "a switch is turned": lambda m: setattr(m.switched, "enabled", True),
    "something is put on a list": lambda m: m.switched.merged.append("this"),
    "an item is set": lambda m: m.switched.scaling.update(this=2.0),
    "a function is replaced": lambda m: setattr(m.switched, "function", torch.tanh),
    "forward is replaced in one module": lambda m: setattr(m, "forward", lambda x: x),
    "a hook is added": lambda m: m.last.register_forward_hook(lambda module, args, output: output + 1),
    "a hook comes before": lambda m: m.last.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
}


@pytest.mark.parametrize("looks", ["first", "beside", "after"])
@pytest.mark.parametrize("name", ALTERATIONS)
def test_what_is_done_to_the_original_is_noticed(name: str, looks: Any) -> None:
    model = Net().eval()
    fast = frozen(model)
    variant = fast.variants[0]
    variant.run.asks_beside, variant.looks_first = looks == "beside", looks == "first"
    with torch.no_grad():
        fast(X)
    assert not fast.notes
    ALTERATIONS[name](model)
    x = X.to(next(model.parameters()).dtype)
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
    assert ran_the_original(fast)


def test_a_part_that_is_put_back_counts_again() -> None:
    model = Net().eval()
    fast, last = frozen(model), model.last
    model.last = nn.Linear(4, 4)
    fast(X)
    assert ran_the_original(fast)
    model.last = last
    fast.notes.clear()
    fast(X)
    assert not fast.notes


def test_a_switch_that_is_turned_back_counts_again() -> None:
    model = Net().eval()
    fast = frozen(model)
    handle = model.norm.register_forward_hook(lambda *_: None)
    model.switched.merged.append("this")
    fast(X)
    assert len(fast.notes) == 1 and "a hook was added" in fast.notes[0]
    handle.remove()
    fast(X)
    assert "switched.merged was set" in fast.notes[1]
    model.switched.merged.clear()
    fast.notes.clear()
    fast(X)
    assert not fast.notes


def test_a_hook_that_was_there_is_missed() -> None:
    model = Net().eval()
    handle = model.last.register_forward_hook(lambda module, args, output: output + 1)
    fast = frozen(model)
    assert torch.equal(fast(X), model(X)) and not fast.notes
    handle.remove()
    assert torch.equal(fast(X), model(X)) and ran_the_original(fast)


def test_hooks_of_other_models_change_nothing() -> None:
    model, other = Net().eval(), Net().eval()
    fast = frozen(model)
    other.last.register_forward_hook(lambda *_: None)
    fast(X)
    assert not fast.notes


def test_what_calls_write_is_no_switch() -> None:
    model = Net().eval()
    fast = refold.optimize(model, (X,), backend="plain", progress=False)
    calls = model.switched.calls
    with torch.no_grad():
        torch.testing.assert_close(fast(X[:2]), model(X[:2]))
    assert model.switched.calls > calls and len(fast.notes) == 1, "another size runs the original"
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))
    assert len(fast.notes) == 1


def test_hidden_states_that_were_asked_for_once_do_not_slow_it_down() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16, vocab_size=20
    )
    model, inputs = transformers.BertModel(config).eval(), {"input_ids": torch.randint(0, 20, (1, 4))}
    fast = refold.optimize(model, inputs, backend="plain", progress=False)
    with torch.no_grad():
        assert len(fast(**inputs, output_hidden_states=True).hidden_states) == 2
        assert any(module._forward_hooks for module in model.modules()), "transformers leaves its hooks there"
        fast.notes.clear()
        fast(**inputs)
    assert not fast.notes


def test_adapters_may_be_merged_disabled_and_chosen() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    settings = peft.LoraConfig(target_modules=["0", "2"], init_lora_weights=False)
    model = peft.get_peft_model(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), settings).eval()
    model.add_adapter("other", settings)
    fast = refold.optimize(model, (X,), backend="plain", progress=False)
    turns = [model.merge_adapter, model.unmerge_adapter, lambda: model.set_adapter("other"), model.merge_adapter]
    with torch.no_grad():
        for turn in turns:
            turn()
            torch.testing.assert_close(fast(X), model(X))
        with model.disable_adapter():
            torch.testing.assert_close(fast(X), model(X))
    assert ran_the_original(fast)


def test_other_models_that_are_built_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net().eval()
    fast = frozen(model)
    monkeypatch.setattr("refold.optimizing.sameness._parts", lambda model: pytest.fail("it was walked"))
    Net().eval()
    fast(X)
    assert not fast.notes


def test_parameters_that_are_swapped_for_a_call_are_used() -> None:
    model = Net().eval()
    fast = frozen(model)
    others = {name: torch.randn_like(weight) for name, weight in model.named_parameters()}
    with torch.no_grad():
        expected = torch.func.functional_call(model, others, X)
        assert torch.equal(torch.func.functional_call(fast, others, X), expected)
        fast.notes.clear()
        fast(X)
    assert not fast.notes


# --- being the original --------------------------------------------------------------------------------------------


def test_what_is_set_on_it_is_set_on_the_original() -> None:
    model = Net().eval()
    fast = frozen(model)
    fast.label = "mine"
    assert model.label == "mine" and fast.variants, "a new attribute makes no difference to what was built"
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


# --- optimizing again ----------------------------------------------------------------------------------------------


def test_what_cannot_be_optimized_again_is_run_as_it_is() -> None:
    def fail(args: Any, kwargs: Any) -> Variant:
        raise RuntimeError("no such luck")

    model = Net().eval()
    fast, x = frozen(model, fail), torch.randn(5, 4)
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
    assert any("no such luck" in note for note in fast.notes)


def test_gradients_of_a_new_input_are_there_at_the_first_call() -> None:
    model = Net().eval()
    fast = frozen(model, lambda args, kwargs: pytest.fail("it was optimized"))
    x = torch.randn(5, 4, requires_grad=True)
    fast(x).sum().backward()
    assert x.grad is not None
