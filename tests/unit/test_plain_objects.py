"""Objects that are nothing but their attributes (caches of keys and values) are part of what a graph gives."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import refold
from refold.capturing.errors import CaptureError
from refold.executors.tree import Layout, map_tensors, tensors_of
from refold.plain_objects import attributes_of
from refold.verifying.leaves import leaves_of, same_leaves


class Entry:
    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values
        self.kind: type = Entry
        self.dtype, self.length, self.flags = keys.dtype, keys.shape[0], {0: True}


class Store:
    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.note: str | None = None

    def add(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([torch.tensor([]), keys], dim=0)
        self.entries.append(Entry(joined, values))
        return joined


@dataclass
class Given:
    y: torch.Tensor
    store: Any = None


class Remembers(nn.Module):
    """Makes a store of what it computed and gives it away with its result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Given:
        store = Store()
        for layer in self.layers:
            x = store.add(layer(x), x).relu()
        return Given(x, store)


class Slotted:
    __slots__ = ("x",)


class OwnCopy:
    def __reduce__(self) -> Any:
        return OwnCopy, ()


class Holder:
    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.function = x, print


class Itself:
    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.me = x, self


class Round:
    def __init__(self, x: torch.Tensor) -> None:
        self.x: list[Any] = [x]
        self.x.append(self.x)


def test_what_is_nothing_but_its_attributes() -> None:
    assert set(attributes_of(Store()) or {}) == {"entries", "note"}
    for other in (Slotted(), OwnCopy(), nn.Linear(1, 1), print, Store, torch.ones(1), [1], {"a": 1}, "a", 1, None):
        assert attributes_of(other) is None

    class Local:
        pass

    assert attributes_of(Local()) is None, "nobody finds its class again"


@pytest.mark.parametrize("dynamic", ["auto", False])
def test_a_graph_gives_the_object(dynamic: Any) -> None:
    model, x = Remembers().eval(), torch.randn(3, 4)
    gm = refold.trace(model, x, dynamic=dynamic)
    report = refold.capture_report(gm)
    assert not report.left_out
    with torch.no_grad():
        for graph in (gm, copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
            given = graph(x)
            assert type(given.store) is Store and type(given.store.entries[1]) is Entry
            assert given.store.entries[0].kind is Entry and same_leaves(given, model(x))
        first, second = gm(x), gm(x)
        assert first.store is not second.store and first.store.entries is not second.store.entries
    if dynamic == "auto":
        longer = torch.randn(5, 4)
        with torch.no_grad():
            assert gm(longer).store.entries[0].length == 5 and same_leaves(gm(longer), model(longer))


def test_a_part_has_no_whole_result() -> None:
    with pytest.raises(CaptureError, match="cannot be given with submodule"):
        refold.trace(Remembers().eval(), torch.randn(3, 4), submodule="layers.0", whole_result=True)


def test_joining_to_nothing_is_a_copy() -> None:
    gm = refold.trace(Remembers().eval(), torch.randn(3, 4), dynamic=False)
    assert torch.ops.aten.cat.default not in {node.target for node in gm.graph.nodes}
    assert not any("detach_" in node.name or "lift" in node.name for node in gm.graph.nodes)


@pytest.mark.parametrize("made", [Holder, Itself, Round])
def test_what_cannot_be_made_again_is_left_out_or_refused(made: Any) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> Given:
            return Given(x.sin(), made(x.cos()))

    x = torch.randn(3)
    gm = refold.trace(Odd(), x)
    assert refold.capture_report(gm).left_out == (f"store ({made.__name__})",)
    assert "left out of the result" in str(refold.capture_report(gm))
    with pytest.raises(CaptureError, match=rf"store \({made.__name__}\)"):
        refold.trace(Odd(), x, whole_result=True)
    optimized = refold.optimize(Odd().eval(), x, backend="auto", time_budget=5, progress=False)
    assert optimized.graph_module is None and type(optimized(x).store) is made
    assert "holds what no graph can make" in optimized.report.notes[0]


@pytest.mark.parametrize("backend", ["plain", "compile", "compile-freezing", "onnxruntime", "openvino"])
def test_every_executor_gives_the_object(backend: str) -> None:
    if backend in refold.executors.unavailable("cpu"):
        pytest.skip(refold.executors.unavailable("cpu")[backend])
    model, x = Remembers().eval(), torch.randn(3, 4)
    optimized = refold.optimize(model, x, backend=backend, time_budget=5, progress=False)
    other = torch.randn(3, 4)
    with torch.no_grad():
        given, expected = optimized(other), model(other)
        assert not optimized.notes and type(given) is Given and type(given.store.entries[0]) is Entry
        for (name, a), (its, b) in zip(leaves_of(given), leaves_of(expected), strict=True):
            assert name == its
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(a, b)
        kept = given.store.entries[0].keys.clone()
        optimized(x)
        assert torch.equal(kept, given.store.entries[0].keys), "what was given is never overwritten"


def test_layouts_of_outputs_and_of_inputs() -> None:
    store = Store()
    store.add(torch.ones(2), torch.zeros(2))
    output = {"y": torch.ones(1), "store": store}
    layout, tensors = Layout.of_output(output)
    assert len(tensors) == 3 == len(tensors_of(output))
    assert same_leaves(layout.fill(tensors), output) and layout.fill(tensors)["store"] is not store
    assert float(map_tensors(torch.neg, output)["store"].entries[0].keys[0]) == -1
    for wrong in ([*tensors, tensors[0]], tensors[:-1]):
        with pytest.raises(ValueError, match="3 places"):
            layout.fill(wrong)
    assert len(Layout.of(output)[1]) == 1, "an object that is given is the caller's own"


def test_saved_and_loaded(tmp_path: Path) -> None:
    model, x = Remembers().eval(), torch.randn(3, 4)
    gm = refold.RemoveNoOps()(refold.trace(model, x, dynamic=False, whole_result=True))
    refold.save(gm, tmp_path / "saved")
    loaded = refold.load(tmp_path / "saved", model)
    with torch.no_grad():
        assert same_leaves(loaded(x), model(x))


def test_decoders_keep_their_cache() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=50
    )
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(50, (2, 7))
    optimized = refold.optimize(model, {"input_ids": ids}, backend="plain", time_budget=10, progress=False)
    with torch.no_grad():
        given, expected = optimized(input_ids=ids), model(input_ids=ids)
        assert not optimized.notes and type(given.past_key_values) is type(expected.past_key_values)
        assert given.past_key_values.get_seq_length() == 7
        nexts = [
            model(input_ids=ids[:, :1], past_key_values=result.past_key_values).logits for result in (given, expected)
        ]
        torch.testing.assert_close(*nexts)
        without = optimized(input_ids=ids, use_cache=False)
    assert without.past_key_values is None and "ran the original" in optimized.notes[0]
