"""One test for each private name of torch that the core relies on: an update that changes one is seen here first."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from refold import examples, fx_private
from refold.examples import attention_layers
from refold.record.snapshot import Snapshot
from refold.testing import Portrait


def attention() -> GraphModule:
    return symbolic_trace(attention_layers.attention()[0])


def test_tables() -> None:
    layer = nn.Linear(2, 2)
    assert list(fx_private.table(layer, "_parameters")) == ["weight", "bias"]
    assert all(fx_private.table(layer, name) is vars(layer)[name] for name in fx_private.TABLES)
    assert not set(fx_private.TABLES) & set(fx_private.plain_attributes(layer))


def test_tensors_of_modules() -> None:
    norm, layer = nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False)
    found = fx_private.tensors_of([norm, nn.ReLU(), layer])
    wanted = [*norm.parameters(), layer.weight, *norm.buffers()]
    assert len(found) == len(wanted) and all(map(lambda a, b: a is b, found, wanted))


def test_what_a_graph_module_derives_is_not_plain() -> None:
    gm = attention()
    before = fx_private.plain_attributes(gm)
    gm.graph.call_function(torch.neg, (next(iter(gm.graph.nodes)),))
    gm.recompile()
    after = fx_private.plain_attributes(gm)
    assert before.keys() == after.keys() and all(before[k] is after[k] for k in before)


def test_hooks() -> None:
    layer = nn.Linear(2, 2)
    assert not fx_private.has_hooks(layer)
    for register in (
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
        "register_load_state_dict_post_hook",
        "register_state_dict_pre_hook",
    ):
        layer = nn.Linear(2, 2)
        handle = getattr(layer, register)(lambda *args: None)
        assert fx_private.has_hooks(layer), register
        handle.remove()
        assert not fx_private.has_hooks(layer), register


def test_module_like() -> None:
    layer = nn.Linear(2, 3)
    again = fx_private.module_like(nn.Linear, fx_private.with_own_containers(vars(layer)))
    x = torch.randn(4, 2)
    assert torch.equal(again(x), layer(x)) and again.weight is layer.weight
    again.register_forward_hook(lambda *_: None)
    del again.bias
    assert layer.bias is not None and not fx_private.has_hooks(layer)
    assert not list(fx_private.module_like(nn.Linear, vars(layer), {}).parameters())


def test_the_module_that_is_being_copied() -> None:
    found: list[object] = []

    class Noting:
        def __deepcopy__(self, memo: dict[int, object]) -> Noting:
            found.append(fx_private.module_being_copied(memo))
            return self

    gm, holder = attention(), nn.Linear(1, 1)
    vars(gm)["noting"] = vars(holder)["noting"] = Noting()
    copied = copy.deepcopy(nn.ModuleList([attention(), gm, holder]))
    assert found == [copied[1], None] and fx_private.module_being_copied({}) is None


def test_restored_graph_is_whole() -> None:
    gm = attention()
    before, snapshot = Portrait.of(gm), Snapshot.of(gm)
    nodes = list(gm.graph.nodes)
    for node in reversed(nodes[3:-1]):
        node.replace_all_uses_with(nodes[0])
        gm.graph.erase_node(node)
    gm.graph.call_function(torch.neg, (nodes[0],))
    gm.recompile()
    snapshot.restore(gm)
    snapshot.restore(gm)
    assert before.differences(Portrait.of(gm), same_objects=True) == []
    assert list(gm.graph.nodes) == nodes and len(gm.graph.nodes) == len(nodes)
    gm.graph.lint()
    assert gm.graph.find_nodes(op="call_module", target="query") == [n for n in nodes if n.target == "query"]
    assert all(not n._erased and n.graph is gm.graph for n in nodes)
    gm.recompile()
    assert before.differences(Portrait.of(gm)) == []
    assert next(iter(copy.deepcopy(gm).graph.nodes)).name == nodes[0].name


def test_restoring_gives_the_names_free() -> None:
    gm = attention()
    snapshot = Snapshot.of(gm)
    first = gm.graph.call_function(torch.neg, (next(iter(gm.graph.nodes)),)).name
    snapshot.restore(gm)
    assert gm.graph.call_function(torch.neg, (next(iter(gm.graph.nodes)),)).name == first


def test_names_and_counters() -> None:
    gm = attention()
    names, counts = fx_private.used_names(gm.graph), fx_private.base_counts(gm.graph)
    node = gm.graph.call_function(torch.neg, (next(iter(gm.graph.nodes)),))
    assert fx_private.used_names(gm.graph) - names == {node.name}
    gm.graph.erase_node(node)
    fx_private.free_names(gm.graph, [node.name])
    fx_private.set_base_counts(gm.graph, counts)
    assert fx_private.used_names(gm.graph) == names
    fx_private.rename_nodes(gm.graph, [f"n{i}" for i, _ in enumerate(gm.graph.nodes)])
    gm.recompile()
    assert "n1 = " in gm.code
    gm.graph.lint()


def test_users_in_graph_order() -> None:
    gm = attention()
    x = next(iter(gm.graph.nodes))
    x.users = dict(reversed(x.users.items()))
    fx_private.sort_users(gm.graph)
    assert list(x.users) == [n for n in gm.graph.nodes if x in n.all_input_nodes]


def test_schemas() -> None:
    gm = attention()
    x = next(iter(gm.graph.nodes))
    assert fx_private.written_arguments(torch.ops.aten.add_.Tensor, (x, 1), {}) == [x]
    assert fx_private.written_arguments(torch.ops.aten.add.Tensor, (x, 1), {}) == []
    assert fx_private.returns_alias(torch.ops.aten.view.default)
    assert not fx_private.returns_alias(torch.ops.aten.add.Tensor)


def test_versions_and_addresses() -> None:
    tensor = torch.ones(3)
    version, address = fx_private.version_of(tensor), fx_private.address_of(tensor)
    tensor.add_(1)
    assert fx_private.version_of(tensor) != version and fx_private.address_of(tensor) == address
    with torch.inference_mode():
        assert fx_private.version_of(torch.ones(1)) is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_extents(device: str) -> None:
    whole = torch.zeros(4, 3, device=device)
    place, first, last = fx_private.extent_of(whole) or (0, 0, 0)
    assert last - first == 4 * 3 * 4 - 1 and (place == 0) == (device == "cpu")
    assert fx_private.extent_of(whole[1:3]) == (place, first + 12, first + 35)
    assert fx_private.extent_of(torch.zeros(4, 3, device=device)) != (place, first, last)
    assert fx_private.extent_of(whole[:0]) is None and fx_private.extent_of(torch.zeros(2).to_sparse()) is None


def test_retrace_as_pickle_does() -> None:
    import pickle

    gm = attention()
    parameters = list(gm.parameters())
    again = fx_private.retrace_as_pickle_does(gm)
    assert again.code == pickle.loads(pickle.dumps(gm)).code
    assert all(a is b for a, b in zip(again.parameters(), parameters, strict=True))


def test_codegen() -> None:
    gm, _ = examples.exported(attention_layers.attention())
    code, generator = gm.code, fx_private.codegen(gm.graph)
    fx_private.set_codegen(gm.graph, torch.fx.graph.CodeGen())
    gm.recompile()
    assert gm.code != code
    fx_private.set_codegen(gm.graph, generator)
    gm.recompile()
    assert gm.code == code


def test_who_observes_operations_is_seen():
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        assert fx_private.is_plain() is not fx_private.is_observed()
        seen.append(fx_private.is_observed())
        return x.sum()

    look(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    torch.func.grad(look)(torch.ones(2))
    torch.func.jvp(look, (torch.ones(2),), (torch.ones(2),))
    with torch.autograd.forward_ad.dual_level():
        look(torch.ones(2))
    torch.jit.trace(look, torch.ones(2), check_trace=False)
    make_fx(look)(torch.ones(2))
    with FlopCounterMode(display=False):
        look(torch.ones(2))
    look(torch.ones(2))
    assert seen == [False, *[True] * 7, False]


def test_autocast_is_not_plain():
    assert fx_private.is_plain()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not fx_private.is_plain() and not fx_private.is_observed()


def test_what_has_no_values_has_sizes():
    with fx_private.no_values():
        made = torch.empty(3, 4) @ torch.empty(4, 2**20)
    assert made.shape == (3, 2**20) and made.device.type == "cpu"
    with pytest.raises(RuntimeError, match="_local_scalar_dense"):
        made[0, 0].item()
