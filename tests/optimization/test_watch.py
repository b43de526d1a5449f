"""What an optimized model notices of later changes of the original, and what is frozen; results are never stale."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_way import run_one_way
from torch import nn

import refold
from refold.executors import Checked, Executor, catalogue
from refold.executors.cuda_graph import GraphRunner
from refold.optimization import choice
from refold.optimization.optimized_module import OptimizedModule
from refold.optimization.watch import Watch, moving_weights, read_in_eval

X = torch.randn(3, 4)
WEIGHTS = "weights of the original were changed since it was optimized"
PARTS = "a parameter, buffer or module of the original was replaced since it was optimized"
MODE = "a module of the original was put into another mode since it was optimized"
HOOK = "a hook was added to the original or taken away since it was optimized"
ADAPTER = "an adapter of the original was chosen, disabled or merged since it was optimized"


class Adapted(nn.Module):
    """Says about its adapters what layers of PEFT say."""

    def __init__(self) -> None:
        super().__init__()
        self.active_adapters, self.disable_adapters, self.merged_adapters = ["this"], False, []
        self.scaling = {"this": 1.0, "other": 2.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.disable_adapters or self.merged_adapters:
            return x
        return x * self.scaling[self.active_adapters[0]] + 1


class Scaled(nn.Module):
    """Computes something else in training, and torch knows nothing of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x if self.training else x


class UnhashableHook:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4)
        self.act: nn.Module = nn.ReLU()
        self.steps = nn.ModuleList([nn.Linear(4, 4), Scaled()])
        self.tail = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.register_buffer("shift", torch.randn(4))
        self.adapted = Adapted()
        self.table, self.tables, self.temperature, self.function = torch.randn(4), [torch.randn(4)], 1.0, torch.relu
        self.tail[0].register_forward_hook(lambda module, args, output: output - 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.adapted(self.drop(self.act(self.norm(self.first(x)))))
        for step in self.steps:
            x = step(x)
        x = self.function(self.last(self.tail(x)) + self.shift + self.table + self.tables[0])
        return x / self.temperature


class Engine(Checked):
    """Computes with copies of the weights."""

    def __init__(self, model: nn.Module) -> None:
        self.copy, self.runs = copy.deepcopy(model), 0

    def run_checked(self, tensors: Any, args: Any, kwargs: Any) -> Any:
        self.runs += 1
        return self.copy(*args, **kwargs)


class Device(Engine):
    """Computes by itself once it is launched, as a CUDA graph does."""

    is_asynchronous = True


def frozen(model: nn.Module, engine: type[Engine] = Engine) -> OptimizedModule:
    """A model that runs as an engine with copies of the weights runs it."""
    watch = Watch(read_in_eval(model), None, reads_live_weights=False).watch_modules(model)
    return run_one_way(model, X, engine(model), watch)


def write(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(3)


def step(model: nn.Module, fused: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    model(X).sum().backward()
    optimizer.step()


def write_through_data(weight: torch.Tensor) -> None:
    weight.data.mul_(2)


def give_other_memory(weight: torch.Tensor) -> None:
    weight.data = weight.data * 2


def move_hook(model: Any) -> None:
    key, hook = model.tail[0]._forward_hooks.popitem()
    model.tail[1]._forward_hooks[key] = hook


def replace_hook(model: Any) -> None:
    hooks = model.tail[0]._forward_hooks
    hooks.update(dict.fromkeys(hooks, add_one))


def swap_children(model: Any) -> None:
    children = model.tail._modules
    children["0"], children["1"] = children["1"], children["0"]


def add_one(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 1


NOTICED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a weight is written": (WEIGHTS, lambda m: write(m.first.weight)),
    "a bias is written": (WEIGHTS, lambda m: write(m.last.bias)),
    "a buffer is written": (WEIGHTS, lambda m: write(m.shift)),
    "running statistics are written": (WEIGHTS, lambda m: write(m.norm.running_mean.add_(1))),
    "a checkpoint is loaded": (WEIGHTS, lambda m: m.load_state_dict(Net().state_dict())),
    "an optimizer steps": (WEIGHTS, lambda m: step(m, fused=False)),
    "a fused optimizer steps": (WEIGHTS, lambda m: step(m, fused=True)),
    "a weight gets other memory": (WEIGHTS, lambda m: give_other_memory(m.last.weight)),
    "everything is cast": (WEIGHTS, lambda m: m.double()),
    "a part is cast and cast back": (WEIGHTS, lambda m: m.last.half().float()),
    "a parameter is replaced": (PARTS, lambda m: setattr(m.last, "weight", nn.Parameter(torch.ones(4, 4)))),
    "a parameter is put into the table": (
        PARTS,
        lambda m: m.last._parameters.update(weight=nn.Parameter(torch.ones(4, 4))),
    ),
    "a bias is taken away": (PARTS, lambda m: setattr(m.last, "bias", None)),
    "a buffer is replaced": (PARTS, lambda m: setattr(m, "shift", torch.ones(4))),
    "a table is replaced": (PARTS, lambda m: setattr(m.last, "_parameters", nn.Linear(4, 4)._parameters)),
    "a parameter is reparametrized": (PARTS, lambda m: nn.utils.parametrizations.weight_norm(m.last)),
    "a checkpoint is assigned": (PARTS, lambda m: m.load_state_dict(Net().state_dict(), assign=True)),
    "a module is replaced": (PARTS, lambda m: setattr(m, "act", nn.Tanh())),
    "a module without weights is replaced by another": (PARTS, lambda m: m.tail.__setitem__(1, nn.ReLU())),
    "a deep module is replaced": (PARTS, lambda m: setattr(m, "last", nn.Sequential(nn.Linear(4, 4)))),
    "a child is deleted": (PARTS, lambda m: m.tail.__delitem__(1)),
    "a child is popped": (PARTS, lambda m: m.steps.pop(0)),
    "a child is inserted": (PARTS, lambda m: m.tail.insert(0, nn.ReLU())),
    "a child is appended": (PARTS, lambda m: m.steps.append(nn.Tanh())),
    "a child is appended to what was a leaf": (PARTS, lambda m: m.act.add_module("inner", nn.Tanh())),
    "children change places": (PARTS, swap_children),
    "a parameter is put under a new name": (PARTS, lambda m: m.act._parameters.update(new=nn.Parameter(torch.ones(1)))),
    "a buffer is registered": (PARTS, lambda m: m.act.register_buffer("new", torch.ones(1))),
    "a buffer is put into the table": (PARTS, lambda m: m._buffers.update(shift=torch.ones(4))),
    "a module is put into the table": (PARTS, lambda m: m._modules.update(act=nn.Tanh())),
    "a module is taken out of the table": (PARTS, lambda m: m.tail._modules.popitem()),
    "a list is extended": (PARTS, lambda m: m.steps.extend([nn.Tanh(), nn.ReLU()])),
    "a norm trains": (MODE, lambda m: m.norm.train()),
    "a module of one's own trains": (MODE, lambda m: m.steps[1].train()),
    "a hook is added": (HOOK, lambda m: m.last.register_forward_hook(add_one)),
    "a hook comes before": (HOOK, lambda m: m.last.register_forward_pre_hook(lambda module, args: (args[0] + 1,))),
    "a hook that has no hash is added": (HOOK, lambda m: m.last.register_forward_hook(UnhashableHook())),
    "a hook is taken away": (HOOK, lambda m: m.tail[0]._forward_hooks.clear()),
    "a hook is replaced": (HOOK, replace_hook),
    "a hook moves to another layer": (HOOK, move_hook),
    "adapters are disabled": (ADAPTER, lambda m: setattr(m.adapted, "disable_adapters", True)),
    "another adapter is active": (ADAPTER, lambda m: setattr(m.adapted, "active_adapters", ["other"])),
    "an adapter is merged": (ADAPTER, lambda m: m.adapted.merged_adapters.append("this")),
}

FROZEN: dict[str, Callable[[Any], Any]] = {
    "a number is set": lambda m: setattr(m, "temperature", 2.0),
    "an item is set": lambda m: m.adapted.scaling.update(this=2.0),
    "a function is replaced": lambda m: setattr(m, "function", torch.tanh),
    "forward is replaced in one module": lambda m: setattr(m, "forward", lambda x: x),
    "a tensor that is no buffer is replaced": lambda m: setattr(m, "table", torch.ones(4)),
    "a tensor that is no buffer is written": lambda m: write(m.table),
    "a tensor in a list is written": lambda m: write(m.tables[0]),
    "a copied weight is written through .data": lambda m: write_through_data(m.last.weight),
}


@pytest.mark.parametrize("engine", [Engine, Device])
@pytest.mark.parametrize("name", NOTICED)
def test_noticed_at_the_call(name: str, engine: type[Engine]) -> None:
    model = Net().eval()
    fast = frozen(model, engine)
    with torch.no_grad():
        fast(X)
    assert not fast.notes
    sentence, change = NOTICED[name]
    change(model)
    x = X.to(model.first.weight.dtype)
    for _ in range(2):
        with torch.no_grad():
            torch.manual_seed(0)
            given = fast(x)
            torch.manual_seed(0)
            assert torch.equal(given, model(x))
    if x.dtype == X.dtype:
        assert fast.notes[0] == f"ran the original: {sentence}"


@pytest.mark.parametrize("name", FROZEN)
def test_frozen(name: str) -> None:
    """As documented: the model is optimized again after these."""
    model = Net().eval()
    fast = frozen(model)
    before = fast(X)
    FROZEN[name](model)
    assert torch.equal(fast(X), before) and not fast.notes
    assert torch.equal(frozen(model)(X), model(X)), "what is built now is that of now"


def test_weights_of_inference_mode_are_frozen() -> None:
    """Torch does not count what is written into them."""
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        watch = Watch(read_in_eval(model), None, reads_live_weights=False).watch_modules(model)
        model[0].weight.mul_(2)
        assert watch.why_changed() is None
        give_other_memory(model[0].weight)
        assert watch.why_changed() == WEIGHTS


# --- what is put back, and what does not count ---------------------------------------------------------------------


def test_what_is_put_back_counts_again() -> None:
    model = Net().eval()
    fast, last = frozen(model), model.last
    model.last = nn.Linear(4, 4)
    handle = model.norm.register_forward_hook(lambda *_: None)
    model.adapted.merged_adapters.append("this")
    model.drop.train()
    fast(X)
    assert len(fast.notes) == 1
    model.last = last
    handle.remove()
    model.adapted.merged_adapters.clear()
    model.drop.eval()
    fast.notes.clear()
    fast(X)
    assert not fast.notes


def test_hooks_of_other_models_change_nothing() -> None:
    model, other = Net().eval(), Net().eval()
    fast = frozen(model)
    other.last.register_forward_hook(lambda *_: None)
    fast(X)
    assert not fast.notes


def test_a_hook_on_all_modules_is_noticed() -> None:
    fast = frozen(Net().eval())
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        fast(X)
    finally:
        handle.remove()
    assert fast.notes == [f"ran the original: {HOOK}"]


def test_what_calls_write_in_plain_attributes_does_not_count() -> None:
    class Counting(Net):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x)

    model = Counting().eval()
    fast = refold.optimize(model, (X,), backend="plain", progress=False)
    calls = model.calls
    with torch.no_grad():
        torch.testing.assert_close(fast(X[:2]), model(X[:2]))
        assert model.calls > calls and len(fast.notes) == 1, "another size runs the original"
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
        model.encoder.register_forward_hook(lambda *_: None)
        fast(**inputs)
    assert len(fast.notes) == 1


def test_adapters_of_peft_may_be_merged_disabled_and_chosen() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    settings = peft.LoraConfig(target_modules=["0", "2"], init_lora_weights=False)
    model = peft.get_peft_model(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), settings).eval()
    model.add_adapter("other", settings)
    watch = Watch(read_in_eval(model), None, reads_live_weights=False).watch_modules(model)
    fast = refold.optimize(model, (X,), backend="plain", progress=False)
    with torch.no_grad():
        torch.testing.assert_close(fast(X), model(X))
        assert not fast.notes
        model.merge_adapter()
        assert watch.why_changed() is not None
        for turn in (model.unmerge_adapter, lambda: model.set_adapter("other"), model.merge_adapter):
            turn()
            torch.testing.assert_close(fast(X), model(X))
        with model.disable_adapter():
            torch.testing.assert_close(fast(X), model(X))
    assert any(note.startswith("ran the original") for note in fast.notes)


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


# --- results are never stale ---------------------------------------------------------------------------------------


@torch.no_grad()
def test_what_a_device_computes_is_launched_first_and_handed_out_after_the_check() -> None:
    model = Net().eval()
    fast = frozen(model, Device)
    way = fast.prepared.at_example
    runs_when_checked: list[int] = []
    check = way.watch.why_changed
    way.watch.why_changed = lambda: runs_when_checked.append(way.run.runs) or check()
    assert torch.equal(fast(X), model(X)) and runs_when_checked == [1]
    model.last.bias.add_(1)
    for _ in range(3):
        assert torch.equal(fast(X), model(X))
    assert way.run.runs == 2, "computed in vain once, then checked first"


def test_only_cuda_graphs_are_launched_before_the_check() -> None:
    assert GraphRunner.is_asynchronous and not Checked.is_asynchronous
    model = Net().eval()
    assert frozen(model, Device).prepared.at_example.launches_first
    assert not frozen(model).prepared.at_example.launches_first


@torch.no_grad()
def test_an_engine_does_not_compute_with_old_weights() -> None:
    pytest.importorskip("onnxruntime")
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval(), torch.randn(2, 8)
    fast = refold.optimize(model, (x,), backend="onnxruntime", progress=False)
    torch.testing.assert_close(fast(x), model(x))
    assert not fast.notes
    give_other_memory(model[2].weight)
    assert torch.equal(fast(x), model(x)) and fell_back(fast)


@torch.no_grad()
def test_calls_in_many_threads_never_get_old_weights() -> None:
    model = Net().eval()
    fast = frozen(model)
    old, written, wrong = model(X), threading.Event(), []

    def call() -> None:
        with torch.no_grad():
            for _ in range(30):
                after = written.is_set()
                output = fast(X)
                if after and torch.allclose(output, old):
                    wrong.append(output)
                time.sleep(0.001)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.02)
    model.last.bias.add_(1)
    written.set()
    for thread in threads:
        thread.join()
    assert not wrong and len(set(fast.notes)) == 1


def test_memory_that_is_freed_and_given_out_again_is_not_taken_for_the_old() -> None:
    weight = nn.Parameter(torch.ones(4))
    watch = Watch([weight], None, reads_live_weights=False)
    address = weight.data_ptr()
    give_other_memory(weight)
    watch._addresses = [weight.data_ptr()]  # as if it had been given the same place
    assert weight.data_ptr() != address and watch.why_changed() == WEIGHTS


def test_memory_that_is_only_compared_is_not_held() -> None:
    weight = nn.Parameter(torch.ones(4))
    watch = Watch([weight], None, reads_live_weights=False)
    memory = weakref.ref(weight.untyped_storage())
    give_other_memory(weight)
    gc.collect()
    assert memory() is None and watch.why_changed() == WEIGHTS


def test_memory_that_is_put_back_counts_again() -> None:
    weight = nn.Parameter(torch.ones(4))
    watch = Watch([weight], None, reads_live_weights=False)
    before = weight.data
    give_other_memory(weight)
    assert watch.why_changed() == WEIGHTS
    weight.data = before
    assert watch.why_changed() is None


# --- weights that are shared with a graph --------------------------------------------------------------------------


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.query(x) + 2 * self.key(x) + 3 * self.value(x)


class Columns(nn.Module):
    """Weights of (in, out), as GPT-2 has them: merged by columns, which are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(8, 8)) for _ in range(2))
        self.bias_1, self.bias_2 = (nn.Parameter(torch.randn(8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias_1, x, self.first) * torch.addmm(self.bias_2, x, self.second)


def merged(model: nn.Module, x: torch.Tensor) -> OptimizedModule:
    """As refold.optimize makes it, but for sure with the merge."""

    gm = refold.trace(model, x, dynamic=False)
    refold.MergeLinears()(gm)
    assert len(refold.history(gm)) == 1, "the merge must have fired"
    return run_one_way(model, x, gm, Watch(read_in_eval(model), gm, reads_live_weights=True), gm)


def fell_back(optimized: OptimizedModule) -> bool:
    return any(WEIGHTS in note for note in optimized.notes)


def change(*tensors: torch.Tensor) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(3)


def output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x).clone()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def test_merged_weights_are_followed(x: torch.Tensor):
    model = Linears().eval()
    optimized = merged(model, x)
    before = output(optimized, x)
    change(model.query.weight, model.value.bias)
    torch.testing.assert_close(output(optimized, x), output(model, x))
    assert not torch.equal(before, output(optimized, x)) and not fell_back(optimized)


def test_weights_that_were_joined_by_columns_are_copies(x: torch.Tensor):
    model = Columns().eval()
    optimized = merged(model, x)
    change(model.first)
    torch.testing.assert_close(output(optimized, x), output(model, x))
    assert fell_back(optimized)


class Positions(Linears):
    """A buffer that no checkpoint holds becomes part of a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.arange(8.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + (self.positions * 2).cos())


def test_weights_beside_a_constant_are_followed_and_its_buffers_are_watched(x: torch.Tensor):
    model = Positions().eval()
    gm = refold.trace(model, x, dynamic=False)
    refold.compose(refold.FoldConstants(), refold.MergeLinears())(gm)
    assert [change.name for change in refold.history(gm)] == ["FoldConstants", "MergeLinears"]
    watch = Watch(read_in_eval(model), gm, reads_live_weights=True)
    change(model.query.weight)
    assert watch.why_changed() is None
    torch.testing.assert_close(output(gm, x), output(model, x))
    change(model.positions)
    assert watch.why_changed() == WEIGHTS


def test_a_piece_of_memory_that_only_others_read_is_not_followed(x: torch.Tensor):
    memory = torch.randn(3 * 64)
    model = Columns().eval()
    model.first.data, model.second.data = memory[:64].view(8, 8), memory[64:128].view(8, 8)
    model.third = nn.Parameter(memory[128:].view(8, 8))
    gm = refold.trace(model, x, dynamic=False)
    refold.MergeLinears()(gm)
    gm.third = model.third  # the same storage, another piece of it
    watch = Watch(read_in_eval(model), gm, reads_live_weights=True)
    change(model.third)
    assert watch.why_changed() is None
    change(model.first)
    assert watch.why_changed() == WEIGHTS


def test_weights_that_are_merged_by_another_optimized_model(x: torch.Tensor):
    """The second one finds them merged and leaves them where they lie. Nobody tells the first one that they have moved
    when the second is restored."""
    model = Linears().eval()
    first = merged(model, x)
    second = merged(model, x)
    torch.testing.assert_close(output(first, x), output(model, x))
    assert not fell_back(first)
    change(model.query.weight)
    torch.testing.assert_close(output(first, x), output(model, x))
    torch.testing.assert_close(output(second, x), output(model, x))
    assert not fell_back(second)
    second.restore()
    change(model.key.weight)
    torch.testing.assert_close(output(first, x), output(model, x))
    assert fell_back(first)


class FixedAddresses(Executor):
    """Reads the weights from where they lay when it was prepared, as a CUDA graph does."""

    name = "fixed-addresses"

    def available(self, device: torch.device) -> str | None:
        return None

    def prepare(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        addresses = [weight.data_ptr() for weight in module.parameters()]

        def run(*args: Any, **kwargs: Any) -> Any:
            assert addresses == [weight.data_ptr() for weight in module.parameters()], "it would read freed memory"
            return module(*args, **kwargs)

        return run


def test_what_reads_fixed_addresses_is_prepared_again_when_merged_weights_move(
    x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(catalogue, "BUILT_IN", (*catalogue.BUILT_IN, FixedAddresses()))
    monkeypatch.setattr(choice.ExecutorChoice, "rewrites_hinder", True)
    model = Linears().eval()
    optimized = refold.optimize(
        model, (x,), backend="fixed-addresses", pipeline=[refold.MergeLinears()], progress=False
    )
    assert not refold.history(optimized.graph_module), "the merge was taken back"
    torch.testing.assert_close(output(optimized, x), output(model, x))
    assert not optimized.notes


def test_memory_that_is_read_is_held_when_the_weights_move(x: torch.Tensor):
    model = Linears().eval()
    watch = Watch(read_in_eval(model), None, reads_live_weights=True)
    address = model.query.weight.data_ptr()
    with moving_weights([watch]):
        optimized = merged(model, x)
    assert model.query.weight.data_ptr() != address
    assert watch.why_changed() is None
    assert address in [held.data_ptr() for _, held in watch._held]
    change(model.query.weight)
    assert watch.why_changed() == WEIGHTS
    assert optimized.graph_module is not None


def test_how_many_batches_a_norm_saw_is_no_weight():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    watch = Watch(read_in_eval(model), None, reads_live_weights=False)
    model[1].num_batches_tracked.add_(1)
    assert watch.why_changed() is None
    model[1].running_mean.add_(1)
    assert watch.why_changed() == WEIGHTS


def test_merged_weights_that_get_other_memory_are_not_followed(x: torch.Tensor):
    model = Linears().eval()
    optimized = merged(model, x)
    write_through_data(model.query.weight)
    torch.testing.assert_close(output(optimized, x), output(model, x))
    assert not fell_back(optimized), "they share their memory"
    give_other_memory(model.query.weight)
    torch.testing.assert_close(output(optimized, x), output(model, x))
    assert fell_back(optimized)


def test_copied_weights_may_move_with_another_graph(x: torch.Tensor):
    """Merging moves them, contents and all: an engine's copy stays right, and is noticed to be old afterwards."""
    model = Linears().eval()
    watch = Watch(read_in_eval(model), None, reads_live_weights=False)
    address = model.query.weight.data_ptr()
    with moving_weights([watch]):
        optimized = merged(model, x)
    assert model.query.weight.data_ptr() != address and optimized.graph_module is not None
    assert watch.why_changed() is None
    change(model.query.weight)
    assert watch.why_changed() == WEIGHTS


def test_weights_that_were_changed_before_they_moved_stay_changed(x: torch.Tensor):
    model = Linears().eval()
    watch = Watch(read_in_eval(model), None, reads_live_weights=False)
    give_other_memory(model.query.weight)
    with moving_weights([watch]):
        merged(model, x)
    assert watch.why_changed() == WEIGHTS
