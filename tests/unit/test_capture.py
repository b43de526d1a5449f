"""Capture on small models: manners, guards, raising, twins, regions, train mode, failures and partial capture."""

from __future__ import annotations

import copy
import dataclasses
import io
import logging
import pickle
import subprocess
import sys
import threading
from typing import Any, NamedTuple

import pytest
import torch
from torch import fx, nn

import refold
from refold.capture import (
    capture_report,
    captured_parts,
    original_model,
    symbolic_trace,
    trace,
    unread_parameters,
)
from refold.capturing.errors import BakedIn, CaptureError, InputMismatch, NeedsInputs
from refold.capturing.module import other_fixed_values
from refold.errors import RefoldError
from refold.verify import verify_last


def seeded(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def targets(graph: fx.Graph, op: str) -> list[Any]:
    return [n.target for n in graph.nodes if n.op == op]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.norm(self.linear(x)) * scale


class Steered(nn.Module):
    """A tensor's value decides what Python does; only its inner block can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.sum().item() > 1e6:
            return x
        return self.inner(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Steered(), Block()])
        self.head = Block()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"y": self.head(x, scale=2.0)}


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: list[torch.Tensor]


class Two(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


class Manners(nn.Module):
    """Positional, keyword, default, nested and plain arguments; a tied weight; a module nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleDict({"b": Block(), "a": Block()})
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(3, 3)
        self.register_buffer("shift", torch.ones(4), persistent=False)
        self.scale = nn.Parameter(torch.full((4,), 2.0))

    def forward(
        self, ids: torch.Tensor, extra: dict[str, torch.Tensor] | None = None, *, mode: str = "sum", power: int = 1
    ) -> Pair:
        x = self.blocks["a"](self.embedding(ids)) * self.scale + self.shift
        x = self.blocks["a"](x) if mode == "sum" else x
        if extra is not None:
            x = x + extra["bias"]
        return Pair(left=self.head(x), right=[x**power])


@pytest.fixture
def manners() -> Manners:
    torch.manual_seed(0)
    return Manners().eval()


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def test_the_models_own_manners(manners: Manners) -> None:
    reference = copy.deepcopy(manners)
    bias = seeded(4)
    captured = trace(manners, IDS, extra={"bias": bias}, power=2)
    for call in (
        lambda m: m(IDS, extra={"bias": bias}, power=2),
        lambda m: m(IDS, {"bias": bias}, power=2),
        lambda m: m(ids=IDS, power=2, extra={"bias": bias}, mode="sum"),
    ):
        got, wanted = call(captured), call(reference)
        assert type(got) is Pair
        assert torch.equal(got.left, wanted.left)
        assert torch.equal(got.right[0], wanted.right[0])


def test_modules_parameters_names_order_and_ties_are_the_models_own(manners: Manners) -> None:
    captured = trace(manners, IDS)
    assert captured.embedding is manners.embedding
    assert captured.blocks.a.linear is manners.blocks["a"].linear
    assert captured.head.weight is captured.embedding.weight
    assert captured.scale is manners.scale
    keys = list(captured.state_dict())
    assert keys == [k for k in manners.state_dict() if k in keys]
    assert "shift" not in keys and captured.shift is manners.shift
    assert targets(captured.graph, "call_module").count("blocks.a.linear") == 2, "called twice"
    assert type(captured.blocks) is nn.Module, "containers are the graph's own"


def test_what_the_graph_never_reads_is_not_lost(manners: Manners) -> None:
    captured = trace(manners, IDS)
    unread = unread_parameters(captured)
    assert unread["unused.weight"] is manners.unused.weight
    assert {"blocks.b.linear.weight", "unused.bias"} <= unread.keys()
    assert original_model(captured) is manners
    assert original_model(copy.deepcopy(captured)) is manners
    loaded = pickle.loads(pickle.dumps(captured))
    assert torch.equal(unread_parameters(loaded)["unused.weight"], manners.unused.weight)
    with pytest.raises(CaptureError, match="not stored"):
        original_model(loaded)


def test_an_argument_written_into_the_graph_cannot_change(manners: Manners) -> None:
    captured = trace(manners, IDS, power=2)
    with pytest.raises(InputMismatch, match="'power' was 2 at capture"):
        captured(IDS, power=3)
    with pytest.raises(InputMismatch, match="'power' was 2 at capture"):
        captured(IDS)  # the model would take its default, 1
    with pytest.raises(InputMismatch, match="'extra'"):
        captured(IDS, extra={"bias": seeded(4)}, power=2)
    with pytest.raises(InputMismatch, match="ids must be a tensor"):
        captured([[1, 2]], power=2)
    with pytest.raises(TypeError, match="nothing"):
        captured(IDS, nothing=1)


def test_a_size_or_dtype_it_cannot_take_is_a_clear_error() -> None:
    captured = trace(nn.Conv1d(3, 4, 3).eval(), seeded(2, 3, 16))
    assert captured(seeded(5, 3, 9)).shape == (5, 4, 7)
    with pytest.raises(InputMismatch, match="size 4 in dimension 1, but the graph was captured for size 3 only"):
        captured(seeded(2, 4, 16))
    with pytest.raises(InputMismatch, match="2 dimensions"):
        captured(seeded(3, 16))
    assert issubclass(InputMismatch, RefoldError)


def test_fixed_sizes_on_request() -> None:
    captured = trace(nn.Linear(4, 4).eval(), seeded(2, 4), dynamic=False)
    assert capture_report(captured).dynamic == {"input": ()}
    with pytest.raises(InputMismatch, match="captured for size 2 only"):
        captured(seeded(3, 4))


def test_given_dynamic_shapes() -> None:
    batch = torch.export.Dim("batch", min=1, max=8)
    captured = trace(Block().eval(), seeded(2, 4), dynamic={"x": {0: batch}})
    assert capture_report(captured).dynamic == {"x": (0,)}
    assert captured(seeded(8, 4)).shape == (8, 4)
    with pytest.raises(InputMismatch, match="9"):
        captured(seeded(9, 4))
    with pytest.raises(CaptureError, match="dynamic='most' is not known"):
        trace(Block(), seeded(2, 4), dynamic="most")


class BatchOfTwo(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(2, -1).sum(1)


def test_what_is_dynamic_was_tried_not_believed() -> None:
    report = capture_report(trace(BatchOfTwo(), seeded(2, 4)))
    assert any(tried != "the example" for tried in report.sizes_tried)
    for name, dims in report.dynamic.items():
        for dim in dims:
            assert any(t.startswith(f"{name}.shape[{dim}]") for t in report.sizes_tried)


def test_node_meta_keeps_values_modules_and_lines(manners: Manners) -> None:
    captured = trace(manners, IDS)
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
def test_a_baked_mode_is_refused_before_anything_changes(model: nn.Module) -> None:
    captured = trace(model.eval(), seeded(2, 4))
    with pytest.raises(BakedIn, match="captured in eval mode"):
        captured.train()
    assert not any(m.training for m in captured.modules())
    captured.eval()


class BakedDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.to(torch.float32)).to(x.dtype) + torch.arange(4, dtype=torch.float32)


def test_a_baked_dtype_is_refused_before_anything_changes() -> None:
    captured = trace(BakedDtype().eval(), seeded(2, 4))
    for cast in (lambda: captured.half(), lambda: captured.double(), lambda: captured.to(torch.bfloat16)):
        with pytest.raises(BakedIn, match=r"[Cc]ast before capture"):
            cast()
    with pytest.raises(BakedIn):
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
    assert capture_report(captured).devices_unpinned >= 2
    assert captured(seeded(2, 5, 4)).device.type == "cpu"
    assert captured(torch.empty(2, 5, 4, device="meta")).device.type == "meta"


class Scaled(nn.Embedding):
    """A subclass that does its base's op and something more."""

    def __init__(self) -> None:
        super().__init__(10, 4)
        self.register_buffer("factor", torch.tensor(3.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * self.factor


class NormAct(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(super().forward(x))


class HoldsItsActivation(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: the activation is a child of the norm."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.drop = nn.Identity()
        self.act = nn.Hardswish()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(super().forward(x)))


class Standardized(nn.Conv2d):
    """A subclass whose op does not read its own weight as it is: no twin for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight - self.weight.mean()
        return nn.functional.conv2d(x, weight, self.bias, self.stride, self.padding)


def test_twins_take_the_base_op_of_a_subclass() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), NormAct(4), Standardized(4, 4, 1)).eval()
    x = seeded(2, 3, 5, 5)
    captured = trace(model, x)
    report = capture_report(captured)
    assert report.twins == ("1",)
    twin = captured.get_submodule("1")
    assert type(twin) is nn.BatchNorm2d and twin.weight is model[1].weight
    assert torch.ops.aten.relu.default in targets(captured.graph, "call_function")
    assert torch.ops.aten.conv2d.default in targets(captured.graph, "call_function")
    assert list(captured.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        assert torch.equal(captured(x), model(x))

    embedding = nn.Sequential(Scaled(), nn.Linear(4, 4)).eval()
    captured = trace(embedding, IDS)
    assert type(captured.get_submodule("0")) is nn.Embedding
    assert list(captured.state_dict()) == list(embedding.state_dict())
    with torch.no_grad():
        assert torch.equal(captured(IDS), embedding(IDS))


def test_a_norm_that_holds_its_activation_is_split_folded_and_restored(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), HoldsItsActivation(4), nn.Conv2d(4, 2, 1)).eval()
    model[1].running_mean.normal_()
    reference, x = copy.deepcopy(model), seeded(2, 3, 5, 5)
    captured = trace(model, x)
    assert capture_report(captured).twins == ("1",)
    twin = captured.get_submodule("1")
    assert type(twin) is nn.BatchNorm2d and twin.weight is model[1].weight and not list(twin.children())
    assert [r.path for r in capture_report(captured).refused] == ["1.act"]
    assert list(captured.state_dict()) == list(model.state_dict())
    code = captured.code

    refold.FuseBatchNorm2dInConv2d()(captured)
    assert targets(captured.graph, "call_module") == ["0", "2"]
    with torch.no_grad():
        assert verify_last(captured, (x,))
    refold.save(captured, tmp_path / "folded")
    loaded = refold.load(tmp_path / "folded", graph_module=trace(copy.deepcopy(reference), x))
    for graph in (captured, loaded):
        refold.undo(graph)
        with torch.no_grad():
            assert graph.code == code and torch.equal(graph(x), reference(x))


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 4)
        self.outside = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            frozen = self.inside(x)
        with torch.autocast("cpu", enabled=False):
            return self.outside(frozen) * x


def test_regions_are_inlined_and_no_grad_still_means_it() -> None:
    model = Regions().eval()
    x = seeded(2, 4)
    captured = trace(model, x)
    report = capture_report(captured)
    assert report.regions_inlined == 2
    assert report.raised == ("inside", "outside")
    reference = copy.deepcopy(model)
    reference(x).sum().backward()
    captured(x).sum().backward()
    assert captured.inside.weight.grad is None and reference.inside.weight.grad is None
    assert torch.equal(captured.outside.weight.grad, reference.outside.weight.grad)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x)
        return y.float() + 1


def test_an_enabled_autocast_keeps_its_meaning() -> None:
    model = Autocast().eval()
    x = seeded(2, 4)
    captured = trace(model, x)
    with torch.no_grad():
        assert torch.equal(captured(x), model(x))
        assert not torch.equal(captured(x), model.linear(x) + 1), "it really ran in bfloat16"


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


def test_what_cannot_be_raised_stays_and_is_named() -> None:
    model = Recurrent().eval()
    captured = trace(model, seeded(2, 3, 4))
    report = capture_report(captured)
    assert [r.path for r in report.refused] == ["lstm"] and not report.complete
    assert "lstm (LSTM)" in str(report)
    assert list(captured.state_dict()) == list(model.state_dict())
    assert captured.lstm.weight_ih_l0 is model.lstm.weight_ih_l0


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Two:
        y = self.linear(x)
        z = y + 1
        self.relu(y)
        y.add_(z)
        return Two(y, z)


def test_writes_in_place_keep_their_order() -> None:
    model = InPlace().eval()
    captured = trace(model, seeded(2, 4))
    result, expected = captured(seeded(2, 4)), copy.deepcopy(model)(seeded(2, 4))
    assert type(result) is Two
    assert torch.equal(result.one, expected.one) and torch.equal(result.other, expected.other)


class Counting(nn.Module):
    """Plants attributes, keeps a dict, counts in a buffer, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.seen: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cached = self.linear(x)
        self.seen.setdefault(x.shape[1], torch.arange(x.shape[1]))
        self.calls.add_(1)
        return self.cached + torch.rand_like(x) + self.seen[x.shape[1]]


def test_the_model_and_the_random_state_are_as_before() -> None:
    model = Counting().eval()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    captured = trace(model, seeded(2, 4))
    assert torch.equal(torch.rand(3), expected)
    assert not hasattr(model, "cached") and model.seen == {} and model.calls == 0
    assert capture_report(captured).notes == ("calls of the model set cached, those of the graph do not",)
    captured(seeded(2, 4))
    assert model.calls == 1, "what the graph writes, it writes into the model's own buffer"


class CastsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear = self.linear.to(torch.float32)
        return self.linear(x)


def test_a_cast_that_changes_nothing_is_no_obstacle() -> None:
    model = CastsItself().eval()
    captured = trace(model, seeded(2, 4))
    assert capture_report(captured).method == "torch.export"
    assert captured.linear is model.linear
    assert "to" not in vars(model.linear)


@pytest.mark.parametrize("name", ["block", "manners"])
def test_compile_export_and_jit_take_it(name: str, manners: Manners) -> None:
    model, inputs = (Block().eval(), (seeded(2, 4),)) if name == "block" else (manners, (IDS,))
    captured = trace(model, *inputs)

    def first(result: Any) -> torch.Tensor:
        return result.left if isinstance(result, Pair) else result

    with torch.no_grad():
        expected = first(copy.deepcopy(model)(*inputs))
        assert torch.equal(first(torch.compile(captured, fullgraph=True, backend="eager")(*inputs)), expected)
        if name == "block":  # torch.export and jit want their own result types
            assert torch.equal(torch.export.export(captured, inputs).module()(*inputs), expected)
            assert torch.equal(torch.jit.trace(captured, inputs)(*inputs), expected)
        assert torch.equal(first(fx.symbolic_trace(captured)(*inputs)), expected)


def test_a_failure_names_the_line_the_reason_and_what_to_try() -> None:
    with pytest.raises(CaptureError) as caught:
        trace(Model().eval(), seeded(2, 4))
    text = str(caught.value)
    assert "test_capture.py" in text and "if x.sum().item() > 1e6" in text
    assert "steers Python" in text and "on_failure='partial'" in text and "classic torch.fx" in text


def test_partial_capture_takes_the_largest_parts() -> None:
    model = Model().eval()
    x = seeded(2, 4)
    shell = trace(model, x, on_failure="partial")
    parts = captured_parts(shell)
    assert list(parts) == ["layers.0", "layers.1.inner", "layers.2", "head"]
    assert isinstance(shell, Model) and type(model.head) is Block, "the eager model is not touched"
    assert list(shell.state_dict()) == list(model.state_dict())
    assert shell.head.linear.weight is model.head.linear.weight
    report = capture_report(shell)
    assert report.method == "partial" and report.parts == tuple(parts) and 0.8 < report.share < 1
    with torch.no_grad():
        expected = copy.deepcopy(model)(x)["y"]
        assert torch.equal(shell(x)["y"], expected)
        assert torch.equal(copy.deepcopy(shell)(x)["y"], expected)
    file = io.BytesIO()
    torch.save(shell, file)
    file.seek(0)
    assert capture_report(torch.load(file, weights_only=False)) == report


def test_one_submodule_on_what_the_model_gives_it() -> None:
    model = Model().eval()
    captured = trace(model, seeded(2, 4), submodule="layers.1.inner")
    assert capture_report(captured).raised == ("linear", "norm")
    with pytest.raises(CaptureError, match="no submodule 'tail'; it has layers, head"):
        trace(model, seeded(2, 4), submodule="tail")


def test_inputs_the_model_does_not_take() -> None:
    with pytest.raises(CaptureError, match="cannot be called"):
        trace(Block(), seeded(2, 4), nothing=1)
    with pytest.raises(CaptureError, match="cannot go into a graph"):
        trace(Block(), object())
    with pytest.raises(CaptureError, match="on_failure"):
        trace(Block(), seeded(2, 4), on_failure="ignore")


class Shape(nn.Module):
    """Classic fx can trace it, torch.export cannot: it asks a set for a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, fx.Proxy) and torch.compiler.is_exporting():
            raise RuntimeError("not for export")
        return self.linear(x)


def test_classic_fx_is_the_last_rung() -> None:
    model = Shape().eval()
    captured = trace(model, seeded(2, 4))
    report = capture_report(captured)
    assert report.method == "classic torch.fx"
    assert any("not for export" in attempt for attempt in report.attempts)
    assert captured.linear is model.linear
    with torch.no_grad():
        assert torch.equal(captured(seeded(3, 4)), copy.deepcopy(model)(seeded(3, 4)))


def test_a_traced_module_of_the_users_own_can_be_captured_again() -> None:
    model = Block().eval()
    captured = trace(fx.symbolic_trace(model), seeded(2, 4))
    assert capture_report(captured).raised == ("linear", "norm")


class Several(nn.Module):
    """Gives what torch's own functions give several values in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"top": y.topk(2), "all": [y.max(1), y.sort()]}


def test_torchs_own_tuples_come_back_as_they_are() -> None:
    model, x = Several().eval(), seeded(3, 4)
    captured = trace(model, x)
    for again in (captured, copy.deepcopy(captured), pickle.loads(pickle.dumps(captured)), fx.symbolic_trace(captured)):
        with torch.no_grad():
            got, expected = again(x), model(x)
        assert type(got["top"]) is torch.return_types.topk and torch.equal(got["top"].indices, expected["top"].indices)
        assert [type(t) for t in got["all"]] == [torch.return_types.max, torch.return_types.sort]
        assert torch.equal(got["all"][1].values, expected["all"][1].values)


def test_what_has_no_python_to_follow_is_a_sentence() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), seeded(2, 4)
    for scripted in (torch.jit.trace(model, x), torch.jit.freeze(torch.jit.script(model))):
        with pytest.raises(CaptureError, match="TorchScript module"):
            trace(scripted, x)
    holder = nn.Sequential(torch.jit.script(Block()), Block()).eval()
    assert list(captured_parts(trace(holder, x, on_failure="partial"))) == ["1"]
    nested = torch.nested.nested_tensor([seeded(2, 4), seeded(3, 4)])
    with pytest.raises(CaptureError, match="'input' is a nested tensor"):
        trace(model[0], nested)


class Cropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[: int(length)].mean(0)


def test_values_that_steer_are_told_apart_without_a_call() -> None:
    model, x = Cropped().eval(), seeded(8, 4)
    captured = trace(model, x, torch.tensor(5))
    assert other_fixed_values(captured, (x, torch.tensor(5)), {}) is None
    assert other_fixed_values(captured, (x,), {"length": torch.tensor(5)}) is None
    assert "length steers the model's code and was 5" in str(other_fixed_values(captured, (x, torch.tensor(2)), {}))
    assert "length" in str(other_fixed_values(captured, (x, 5), {}))
    assert other_fixed_values(copy.deepcopy(captured), (x, torch.tensor(2)), {}) is not None
    assert other_fixed_values(model, (x, torch.tensor(2)), {}) is None
    memory = torch.tensor(5).numpy()
    length = torch.from_numpy(memory)
    captured(x, length)
    memory[...] = 2
    assert other_fixed_values(captured, (x, length), {}) is not None, "the same tensor with other values"
    with torch.inference_mode():
        assert other_fixed_values(captured, (x, torch.tensor(5)), {}) is None


def test_symbolic_trace_by_names() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=9
    )
    model = transformers.BertModel(config).eval()
    captured = symbolic_trace(model, input_names=["input_ids", "token_type_ids"], disable_check=True)
    types = torch.ones_like(IDS)
    with torch.no_grad():
        expected = copy.deepcopy(model)(input_ids=IDS, token_type_ids=types)
        assert torch.equal(captured(IDS, token_type_ids=types).last_hidden_state, expected.last_hidden_state)
    with pytest.raises(NeedsInputs, match="Give real inputs"):
        symbolic_trace(model, input_names=["past_key_values"])
    with pytest.raises(NeedsInputs, match="has no input named 'pixels'"):
        symbolic_trace(nn.Linear(4, 4), input_names=["pixels"])


def test_threads_take_turns() -> None:
    results: list[Any] = []

    def work() -> None:
        model = Block().eval()
        captured = trace(model, seeded(2, 4))
        results.append(torch.equal(captured(seeded(2, 4)), model(seeded(2, 4))))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 3


def test_raising_is_cheap_and_copies_no_weights() -> None:
    model = nn.Sequential(*(Block() for _ in range(20))).eval()
    captured = trace(model, seeded(2, 4))
    seconds = capture_report(captured).seconds
    assert seconds["raise"] < 0.2 * seconds["export"]
    assert {p.data_ptr() for p in captured.parameters()} == {p.data_ptr() for p in model.parameters()}


class MindsExport(nn.Module):
    """Runs other code while it is exported, which rounds otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if torch.compiler.is_exporting():
            return sum((y[:, i : i + 1] for i in range(6)), torch.zeros(1)) / 3
        return y.sum(1, keepdim=True) / 3


def test_a_model_that_runs_other_code_in_an_export_is_captured_as_its_calls_run() -> None:
    torch.manual_seed(0)
    model, x = MindsExport().eval(), seeded(64, 6)
    exported = torch.export.export(model, (x,)).module()
    with torch.no_grad():
        assert not torch.equal(exported(x), model(x)), "the two codes must differ for the test to say anything"
    before = torch.compiler.is_exporting
    captured = trace(model, x)
    assert torch.compiler.is_exporting is before
    report = capture_report(captured)
    assert report.method == "torch.export of what calls run"
    assert report.dynamic == {"x": (0,)}
    with torch.no_grad():
        assert torch.equal(captured(x), model(x)) and torch.equal(captured(x[:5]), model(x[:5]))


def test_what_export_and_calls_have_in_common_is_exported_plainly() -> None:
    report = capture_report(trace(nn.Linear(4, 4), seeded(2, 4)))
    assert report.method == "torch.export" and report.attempts == ()


class Untruthful(nn.ModuleList):
    """A model that is an empty container, and so counts as false."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@pytest.mark.parametrize("model", [Untruthful(), torch.compile(nn.Linear(4, 4)), torch.compile(nn.Sequential())])
def test_a_model_is_not_asked_whether_it_is_true(model: nn.Module) -> None:
    x = torch.randn(2, 4)
    captured = trace(model.eval(), x)
    with torch.no_grad():
        assert torch.equal(captured(x), model(x))


class Signed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


def test_attempts_that_fail_are_told_by_the_error_alone(caplog: pytest.LogCaptureFixture) -> None:
    level = logging.getLogger("torch.fx.experimental.symbolic_shapes").level
    with pytest.raises(CaptureError, match="steers"):
        trace(Signed(), torch.randn(2, 4))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert logging.getLogger("torch.fx.experimental.symbolic_shapes").level == level
