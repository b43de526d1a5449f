"""The captured module: the model's own objects, pickling, train mode, dtypes, devices, and other tracers."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from capture_models import IDS, Block, Manners, Pair, seeded, targets
from torch import fx, nn

from refold.capture.tracing import (
    capture_report,
    original_model,
    trace,
    unread_parameters,
)
from refold.errors import CaptureError, FixedByCapture


@pytest.fixture(scope="module")
def captured_manners() -> tuple[Manners, fx.GraphModule]:
    """A model and its graph, for tests that only read them."""
    torch.manual_seed(0)
    model = Manners().eval()
    return model, trace(model, IDS)


def test_modules_parameters_names_order_and_ties_are_the_models_own(captured_manners: Any) -> None:
    manners, captured = captured_manners
    assert captured.embedding is manners.embedding
    assert captured.blocks.a.linear is manners.blocks["a"].linear
    assert captured.head.weight is captured.embedding.weight
    assert captured.scale is manners.scale
    keys = list(captured.state_dict())
    assert keys == [k for k in manners.state_dict() if k in keys]
    assert "shift" not in keys and captured.shift is manners.shift
    assert targets(captured.graph, "call_module").count("blocks.a.linear") == 2, "called twice"
    assert type(captured.blocks) is nn.Module, "containers are the graph's own"


def test_what_the_graph_never_reads_is_not_lost(captured_manners: Any) -> None:
    manners, captured = captured_manners
    unread = unread_parameters(captured)
    assert unread["unused.weight"] is manners.unused.weight
    assert {"blocks.b.linear.weight", "unused.bias"} <= unread.keys()
    assert original_model(captured) is manners
    assert original_model(copy.deepcopy(captured)) is manners
    loaded = pickle.loads(pickle.dumps(captured))
    assert torch.equal(unread_parameters(loaded)["unused.weight"], manners.unused.weight)
    with pytest.raises(CaptureError, match="not stored"):
        original_model(loaded)


def test_node_meta_keeps_values_modules_and_lines(captured_manners: Any) -> None:
    _, captured = captured_manners
    call = next(n for n in captured.graph.nodes if n.target == "blocks.a.linear")
    assert call.meta["val"].dim() == 3 and call.meta["val"].dtype == torch.float32
    assert [path for path, _ in call.meta["nn_module_stack"].values()][-1].startswith("blocks.a.linear")
    assert "linear" in call.meta["stack_trace"]
    loaded = pickle.loads(pickle.dumps(captured))
    call = next(n for n in loaded.graph.nodes if n.target == "blocks.a.linear")
    assert call.meta["val"].dim() == 3 and call.meta["val"].dtype == torch.float32


class FromParameters(nn.Module):
    """Computes a weight from parameters alone: re-tracing would compute it once and for all."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


def test_pickling_computes_nothing_for_good() -> None:
    model = FromParameters().eval()
    x = seeded(2, 3, 8)
    captured = trace(model, x)
    loaded = pickle.loads(pickle.dumps(captured))
    assert loaded.code == captured.code
    assert [n.name for n in loaded.graph.nodes] == [n.name for n in captured.graph.nodes]
    assert list(loaded.state_dict()) == list(captured.state_dict())
    with torch.no_grad():
        for p in (*model.parameters(), *loaded.parameters()):
            p.mul_(2)
        assert torch.equal(loaded(x), model(x))


def test_memory_formats_and_layouts_among_arguments_are_stored() -> None:
    class Formats(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.contiguous(memory_format=torch.channels_last) + torch.zeros(4, layout=torch.strided)

    x, file = torch.randn(2, 3, 4, 4), io.BytesIO()
    captured = trace(Formats(), x)
    assert any(isinstance(v, torch.memory_format) for n in captured.graph.nodes for v in (*n.args, *n.kwargs.values()))
    torch.save(captured, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(x), captured(x)) and loaded(x).stride() == captured(x).stride()
    assert [str(n.kwargs) for n in loaded.graph.nodes] == [str(n.kwargs) for n in captured.graph.nodes]


def test_it_loads_in_another_process(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=9
    )
    model = transformers.BertModel(config).eval()
    captured = trace(model, IDS)
    with torch.no_grad():
        expected = copy.deepcopy(model)(IDS).last_hidden_state
    torch.save((captured, IDS, expected), tmp_path / "captured.pt")
    script = (
        "import sys, torch\n"
        "module, ids, expected = torch.load(sys.argv[1], weights_only=False)\n"
        "with torch.no_grad(): result = module(ids)\n"
        "assert type(result).__name__ == 'BaseModelOutputWithPoolingAndCrossAttentions', type(result)\n"
        "assert torch.equal(result.last_hidden_state, expected)\n"
        "print('same')"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "captured.pt")], capture_output=True, text=True)
    assert done.stdout.strip() == "same", done.stderr


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 1)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.conv(x)))


def test_captured_in_train_mode_gradients_and_statistics_equal_eager() -> None:
    model = Dropping().train()
    x = seeded(4, 3, 5)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    captured = trace(model, x)
    assert captured.training and model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), "statistics were put back"
    assert capture_report(captured).complete

    reference = copy.deepcopy(model)
    torch.manual_seed(3)
    reference(x).square().sum().backward()
    torch.manual_seed(3)
    captured(x).square().sum().backward()
    for (name, p), q in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    for (name, b), c in zip(reference.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(b, c), name
    assert not torch.equal(model.norm.running_mean, before["norm.running_mean"])


def test_modes_that_only_modules_know_can_change() -> None:
    captured = trace(Dropping().eval(), seeded(4, 3, 5))
    captured.train()
    assert captured.drop.training
    captured.eval()


class FunctionalDropout(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


class AsksForMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (2 if self.training else 1)


@pytest.mark.parametrize("model", [FunctionalDropout(), AsksForMode()])
def test_a_specialised_mode_is_refused_before_anything_changes(model: nn.Module) -> None:
    captured = trace(model.eval(), seeded(2, 4))
    with pytest.raises(FixedByCapture, match="captured in eval mode"):
        captured.train()
    assert not any(m.training for m in captured.modules())
    captured.eval()


class SpecialisedDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(torch.float32)).to(x.dtype) + torch.arange(4, dtype=torch.float32)


def test_a_specialised_dtype_is_refused_before_anything_changes() -> None:
    captured = trace(SpecialisedDtype().eval(), seeded(2, 4))
    for cast in (lambda: captured.half(), lambda: captured.double(), lambda: captured.to(torch.bfloat16)):
        with pytest.raises(FixedByCapture, match=r"[Cc]ast before capture"):
            cast()
    with pytest.raises(FixedByCapture):
        nn.Sequential(captured).half()  # from above as well
    assert captured.linear.weight.dtype == torch.float32
    captured.float().to("cpu")


def test_a_free_dtype_can_change() -> None:
    model = Block().eval()
    reference = copy.deepcopy(model).double()
    captured = trace(model, seeded(2, 4)).double()
    x = seeded(2, 4).double()
    assert torch.equal(captured(x), reference(x))


class MakesThings(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return (x @ x.mT).masked_fill(~mask, 0.0) + torch.arange(x.shape[1], device=x.device)


def test_no_device_is_written_into_the_graph() -> None:
    captured = trace(MakesThings(), seeded(2, 3, 4))
    devices = []
    for node in captured.graph.nodes:
        fx.node.map_aggregate(
            (node.args, node.kwargs), lambda a: devices.append(a) if isinstance(a, torch.device) else a
        )
    assert devices == []
    assert capture_report(captured).device_independent >= 2
    assert captured(seeded(2, 5, 4)).device.type == "cpu"
    assert captured(torch.empty(2, 5, 4, device="meta")).device.type == "meta"


@pytest.mark.parametrize("name", ["block", "manners"])
def test_compile_export_and_jit_take_it(name: str, captured_manners: Any) -> None:
    block, x = Block().eval(), seeded(2, 4)
    model, captured = (block, trace(block, x)) if name == "block" else captured_manners
    inputs = (x,) if name == "block" else (IDS,)

    def first(result: Any) -> torch.Tensor:
        return result.left if isinstance(result, Pair) else result

    with torch.no_grad():
        expected = first(copy.deepcopy(model)(*inputs))
        assert torch.equal(first(torch.compile(captured, fullgraph=True, backend="eager")(*inputs)), expected)
        if name == "block":  # torch.export and jit want their own result types
            assert torch.equal(torch.export.export(captured, inputs).module()(*inputs), expected)
            assert torch.equal(torch.jit.trace(captured, inputs)(*inputs), expected)
        assert torch.equal(first(fx.symbolic_trace(captured)(*inputs)), expected)
