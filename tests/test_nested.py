"""Nested values: what each walk opens, and that they are put together again as they were."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import BatchEncoding, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPooling, CausalLMOutputWithPast
from transformers.utils import ModelOutput

import refold
from refold.errors import CaptureError, PreparationFailed
from refold.executors import InputSpec
from refold.nested import (
    ARGUMENT,
    CALL,
    OUTPUT,
    RESULT,
    STRUCTURE,
    Constant,
    Opaque,
    Opening,
    attributes_of,
    copy_nested,
    flatten,
    map_tensors,
    named_leaves,
    rebuild,
    rebuilder,
    same_leaves,
)


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


class Thing:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


@dataclass
class Sized:
    sizes: tuple[tuple[int, int], ...]


def names(value: Any) -> list[str]:
    return [name for name, _ in named_leaves(value)]


class Point(NamedTuple):
    x: Any
    n: int = 1


class Marked(torch.Tensor):
    pass


class Items(list):
    pass


class Table(dict):
    pass


def filled_cache() -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), 0)
    return cache


X = torch.ones(2)
# How many tensors each walk finds: in arguments and results of a captured graph, in calls and outputs of an executor,
# mapped and copied; then the names of all leaves, and whether an executor takes such an argument.
# "-": refused, or left out of a result. None: the value is kept as it is.
WALKS = {
    "tuple": ((X, 1), 1, 1, 1, 1, 1, 1, "0 1", True),
    "dict": ({"a": [X]}, 1, 1, 1, 1, 1, 1, "a[0]", True),
    "dataclass": (Given(X), 1, 1, None, 1, None, 1, "y store", False),
    "NamedTuple": (Point(X), 1, 1, 1, 1, 1, 1, "0 1", True),
    "ModelOutput": (BaseModelOutputWithPooling(X), 1, 1, 1, 1, None, 1, "last_hidden_state", True),
    "DynamicCache": (filled_cache(), "-", 2, None, 2, None, 2, None, False),
    "OrderedDict": (OrderedDict(a=X), 1, 1, 1, 1, None, 1, "a", True),
    "defaultdict": (defaultdict(list, a=X), "-", "-", 1, 1, None, 1, "a", True),
    "deque": (deque([X]), "-", "-", 1, 1, None, None, "", True),
    "a list of its own class": (Items([X]), "-", "-", None, None, None, 1, "0", False),
    "a dict of its own class": (Table(a=X), "-", "-", None, None, None, 1, "a", False),
    "BatchEncoding": (BatchEncoding({"a": X}), "-", "-", None, None, None, 1, "a", False),
    "torch.return_types": (torch.max(torch.ones(2, 2), 0), 2, 2, 2, 2, None, 2, "0 1", True),
    "object": (Thing(X), "-", 1, None, 1, None, 1, "inside", False),
    "object without tensors": (Thing(1), "-", 0, None, None, None, 0, "inside", False),
    "object with slots": (Slotted(), "-", "-", None, None, None, None, "", False),
    "tensor": (X, 1, 1, 1, 1, 1, 1, "", True),
    "tensor subclass": (X.as_subclass(Marked), 1, 1, 1, 1, 1, 1, "", False),
    "parameter": (nn.Parameter(X), 1, 1, 1, 1, 1, 1, "", True),
    "number": (1, None, None, None, None, None, None, "", True),
    "torch.Size": (torch.Size([2]), None, None, None, None, None, None, "", True),
    "memory format": (torch.channels_last, "-", "-", None, None, None, None, "", True),
    "bytes": (b"a", None, None, None, None, None, None, "", False),
    "slice": (slice(1), "-", "-", None, None, 0, None, "", False),
    "function": (len, "-", "-", None, None, None, None, "", False),
    "class": (int, "-", None, None, None, None, None, "", False),
}


def tensors_found(value: Any, opening: Opening) -> int | str | None:
    left_out: list[str] = []
    try:
        tree, leaves = flatten(value, opening, left_out if opening is RESULT else None)
    except Opaque:
        return "-"
    if left_out:
        return "-"
    return None if isinstance(tree, Constant) and tree.value is value else len(leaves)


def tensors_of_another(made: Any, value: Any) -> int | None:
    return None if made is value else sum(isinstance(leaf, torch.Tensor) for _, leaf in named_leaves(made))


@pytest.mark.parametrize("kind", WALKS)
def test_what_each_walk_opens(kind: str) -> None:
    value, *expected, names_of_leaves, is_taken = WALKS[kind]
    found = [tensors_found(value, opening) for opening in (ARGUMENT, RESULT, CALL, OUTPUT)]
    found.append(tensors_of_another(map_tensors(value, torch.clone), value))
    found.append(tensors_of_another(copy_nested(value), value))
    assert found == expected
    if names_of_leaves is not None:
        assert " ".join(names(value)) == names_of_leaves
    if is_taken:
        InputSpec.of((value,), {})
    else:
        with pytest.raises(PreparationFailed):
            InputSpec.of((value,), {})


def test_executors_open_what_others_register() -> None:
    tree, (x,) = flatten({"a": deque([X, 1])}, CALL)
    assert rebuild(tree, [x + 1])["a"][1] == 1


def test_a_structure_is_readable() -> None:
    assert str(flatten((X, {"a": [X, 1]}), STRUCTURE)[0]) == "tuple(*, dict(a: list(*, *)))"


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
        for (name, a), (its, b) in zip(named_leaves(given), named_leaves(expected), strict=True):
            assert name == its
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(a, b)
        kept = given.store.entries[0].keys.clone()
        optimized(x)
        assert torch.equal(kept, given.store.entries[0].keys), "what was given is never overwritten"


def test_an_object_is_opened_where_it_is_given_not_where_it_is_taken() -> None:
    store = Store()
    store.add(torch.ones(2), torch.zeros(2))
    output = {"y": torch.ones(1), "store": store}
    tree, tensors = flatten(output, OUTPUT)
    assert len(tensors) == 3
    assert same_leaves(rebuild(tree, tensors), output) and rebuild(tree, tensors)["store"] is not store
    assert float(rebuild(tree, [-tensor for tensor in tensors])["store"].entries[0].keys[0]) == -1
    assert len(flatten(output, CALL)[1]) == 1, "an object that is given is the caller's own"


@pytest.mark.parametrize("made", [Itself, Round])
def test_what_holds_itself_is_refused(made: Any) -> None:
    with pytest.raises(Opaque):
        flatten(made(torch.ones(1)), OUTPUT)


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


def test_a_container_that_is_there_twice_has_its_leaves_twice() -> None:
    small = (7, 7)
    one, other = Sized((small, small)), Sized((small, tuple(iter(small))))
    assert one.sizes[0] is one.sizes[1] and other.sizes[0] is not other.sizes[1]
    assert names(one) == names(other) == ["sizes[0][0]", "sizes[0][1]", "sizes[1][0]", "sizes[1][1]"]
    assert same_leaves(one, other)
    assert not same_leaves(one, Sized((small, (7, 8))))
    assert not same_leaves(one, Sized((small,)))


def test_values_that_cannot_be_opened_are_leaves_each_time() -> None:
    assert names([len, len]) == ["0", "1"]


def test_what_holds_itself_ends() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    assert names(endless) == ["0"]
    thing = Thing(torch.ones(1))
    thing.again = [thing, thing]  # type: ignore[attr-defined]
    assert names(thing) == ["inside"]


def test_objects_that_know_each_other_are_opened_once() -> None:
    things = [Thing(index) for index in range(30)]
    for thing in things:
        thing.others = things  # type: ignore[attr-defined]
    assert len(names(things)) == 30


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Counted(ModelOutput):
    """Computes a field from a tensor whenever it is made: nothing that could be copied from an example."""

    x: torch.Tensor | None = None
    rows: int | None = None

    def __post_init__(self) -> None:
        self.rows = None if self.x is None else len(self.x)
        super().__post_init__()


def tensor(value: float) -> torch.Tensor:
    return torch.full((2,), value)


QUICK = {
    "two fields": BaseModelOutputWithPooling(last_hidden_state=tensor(1), pooler_output=tensor(2)),
    "a field in the middle is None": CausalLMOutputWithPast(loss=None, logits=tensor(1), attentions=(tensor(2),)),
    "the first field alone": BaseModelOutputWithPooling(last_hidden_state=tensor(1)),
    "hidden states": BaseModelOutputWithPooling(last_hidden_state=tensor(1), hidden_states=(tensor(2), tensor(3))),
    "one output in another": CausalLMOutputWithPast(
        logits=tensor(1), hidden_states=BaseModelOutputWithPooling(pooler_output=tensor(2))
    ),
    "plain containers": {"a": [tensor(1), 3, None], "b": (tensor(2), {"c": "text", "d": []})},
    "a call": ((tensor(1),), {"x": tensor(2), "flag": True}),
    "a tensor": tensor(1),
}


def same(mine: Any, its: Any) -> bool:
    """The same classes, keys in the same order, attributes and tensors."""
    if type(mine) is not type(its):
        return False
    if isinstance(mine, torch.Tensor):
        return mine is its
    if isinstance(mine, dict):
        keys = list(OrderedDict.keys(mine) if isinstance(mine, OrderedDict) else mine)
        values = all(same(mine[key], its[key]) for key in keys)
        attributes = same(vars(mine), vars(its)) if hasattr(mine, "__dict__") else True
        return keys == list(its) and values and attributes
    if isinstance(mine, list | tuple):
        return len(mine) == len(its) and all(map(same, mine, its))
    return bool(mine == its)


@pytest.mark.parametrize("name", QUICK)
def test_a_prepared_rebuild_gives_what_rebuilding_gives(name: str) -> None:
    tree, tensors = flatten(QUICK[name], OUTPUT)
    make, others = rebuilder(tree), [torch.rand(3) for _ in tensors]
    assert same(make(others), rebuild(tree, others))
    assert not others or not same(make(others), rebuild(tree, tensors))


def test_a_model_output_is_made_without_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [value for value in QUICK.values() if isinstance(value, ModelOutput)]
    trees = [flatten(value, OUTPUT) for value in values]
    makers = [rebuilder(tree) for tree, _ in trees]
    monkeypatch.setattr(ModelOutput, "__post_init__", lambda self: pytest.fail("it was made by its class"))
    for (_, tensors), make, value in zip(trees, makers, values, strict=True):
        assert same(make(tensors), value)


def test_a_model_output_is_one_in_every_use() -> None:
    tree, tensors = flatten(QUICK["two fields"], OUTPUT)
    made = rebuilder(tree)(tensors)
    assert made.last_hidden_state is made["last_hidden_state"] is made[0] is tensors[0]
    assert [value is tensor for value, tensor in zip(made.to_tuple(), tensors, strict=True)] == [True, True]
    assert made.hidden_states is None and "hidden_states" not in made
    made.pooler_output = tensors[0]
    assert made[1] is tensors[0]
    flat, _ = torch.utils._pytree.tree_flatten(made)
    assert flat == [tensors[0], tensors[0]]


def test_containers_are_new_at_every_call() -> None:
    tree, tensors = flatten(QUICK["plain containers"], OUTPUT)
    make = rebuilder(tree)
    first, second = make(tensors), make(tensors)
    first["b"][1]["d"].append(1)
    assert second["b"][1]["d"] == [] and make(tensors)["b"][1]["d"] == []


def test_classes_with_ways_of_their_own_are_made_by_themselves() -> None:
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), 0)
    for value in (Pair(tensor(1), tensor(2)), CausalLMOutputWithPast(past_key_values=cache), deque([tensor(1)])):
        tree, tensors = flatten(value, OUTPUT)
        made = rebuilder(tree)(tensors)
        assert type(made) is type(value) and same_leaves(made, value) and made is not value


def test_a_field_that_is_computed_follows_its_tensor() -> None:
    tree, tensors = flatten(Counted(x=tensor(1)), OUTPUT)
    assert rebuilder(tree)([torch.ones(5), torch.ones(())][: len(tensors)]).rows == 5
