"""How a captured module is called: the model's own arguments and results, sizes, and inputs that it refuses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from capture_models import IDS, Block, Manners, Pair, seeded
from torch import fx, nn

from refold.capture.captured import why_refused
from refold.capture.tracing import (
    capture_report,
    symbolic_trace,
    trace,
)
from refold.errors import CaptureError, InputMismatch, NeedsInputs, RefoldError


@pytest.fixture
def manners() -> Manners:
    torch.manual_seed(0)
    return Manners().eval()


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


def test_inputs_the_model_does_not_take() -> None:
    with pytest.raises(CaptureError, match="cannot be called"):
        trace(Block(), seeded(2, 4), nothing=1)
    with pytest.raises(CaptureError, match="cannot go into a graph"):
        trace(Block(), object())
    with pytest.raises(CaptureError, match="on_failure"):
        trace(Block(), seeded(2, 4), on_failure="ignore")


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


class Cropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[: int(length)].mean(0)


def test_values_that_control_flow_depends_on_are_compared_without_a_call() -> None:
    model, x = Cropped().eval(), seeded(8, 4)
    captured = trace(model, x, torch.tensor(5))
    assert why_refused(captured, (x, torch.tensor(5)), {}) is None
    assert why_refused(captured, (x,), {"length": torch.tensor(5)}) is None
    assert "control flow depends on length, which was 5" in str(why_refused(captured, (x, torch.tensor(2)), {}))
    assert "length" in str(why_refused(captured, (x, 5), {}))
    assert why_refused(copy.deepcopy(captured), (x, torch.tensor(2)), {}) is not None
    assert why_refused(model, (x, torch.tensor(2)), {}) is None
    memory = torch.tensor(5).numpy()
    length = torch.from_numpy(memory)
    captured(x, length)
    memory[...] = 2
    assert why_refused(captured, (x, length), {}) is not None, "the same tensor with other values"
    with torch.inference_mode():
        assert why_refused(captured, (x, torch.tensor(5)), {}) is None


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
