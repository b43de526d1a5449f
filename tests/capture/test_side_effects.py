"""Side effects of calls: captured, refused or reported; and put back to the bit."""

from __future__ import annotations

import collections
import copy
from typing import Any

import pytest
import torch
from capture_models import seeded
from torch import nn

from refold.call_arguments import CallArguments
from refold.capture.model_state import untouched
from refold.capture.tracing import capture_report, captured_parts, trace
from refold.errors import CaptureError, NeverCapturable


class Holding(nn.Module):
    """Something of every kind for a forward to change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("h", torch.zeros(1, 4))
        self.register_buffer("g", torch.ones(1, 4))
        self.register_buffer("empty", None)
        self.plain = torch.zeros(1, 4)
        self.last: Any = None
        self.calls = 0
        self.made: dict[Any, Any] = {}
        self.eval()


class Recurrent(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.h = torch.tanh(self.linear(x) + self.h)
        return self.h


class Delayed(Holding):
    """Gives back a view of what the buffer was bound to before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.h[:, 1:]
        self.h = self.linear(x)
        return before


class Exchanged(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.h, self.g = self.g, self.h + self.linear(x)
        return self.h


class InPlace(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.h.mul_(0.5).add_(1)
        return self.linear(x) + self.h


class WritesItsInput(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return self.linear(x)


@pytest.mark.parametrize("kind", [Recurrent, Delayed, Exchanged, InPlace, WritesItsInput])
def test_state_goes_on_from_call_to_call(kind: type[Holding]) -> None:
    model = kind()
    reference = copy.deepcopy(model)
    captured = trace(model, seeded(1, 4))
    assert capture_report(captured).notes == ()
    assert torch.equal(model.h, reference.h), "capture itself leaves nothing behind"
    for seed in range(4):
        x, y = seeded(1, 4, seed=seed), seeded(1, 4, seed=seed)
        with torch.no_grad():
            assert torch.equal(captured(x), reference(y))
        assert torch.equal(x, y)
        assert torch.equal(model.h, reference.h) and torch.equal(model.g, reference.g)


class Counted(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


class CountedForOthers(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x)


class AddsTheLast(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) if self.last is None else self.linear(x) + self.last
        self.last = x
        return y


class AddsToPlainTensor(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.plain = self.plain + 1
        return self.linear(x) + self.plain


class Noting(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.made.setdefault("shapes", []).append(tuple(x.shape))
        return self.linear(x)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Counted, "calls"),
        (CountedForOthers, "calls"),
        (AddsTheLast, "last"),
        (AddsToPlainTensor, "plain"),
        (Noting, "made"),
    ],
)
@pytest.mark.parametrize("warm", [False, True])
def test_state_outside_of_buffers_is_refused_by_name(kind: type[Holding], name: str, warm: bool) -> None:
    model = kind()
    x = seeded(1, 4)
    if warm:
        model(x.clone())
    before = copy.deepcopy(vars(model)[name])
    with pytest.raises(NeverCapturable, match=f"change[s]? {name}"):
        trace(model, x)
    assert model.made == before if name == "made" else str(vars(model)[name]) == str(before)
    outer = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), model).eval()
    shell = trace(outer, x, on_failure="partial")
    reference = copy.deepcopy(outer)
    assert list(captured_parts(shell)) == ["0"]
    with torch.no_grad():
        for seed in range(3):
            assert torch.equal(shell(seeded(1, 4, seed=seed)), reference(seeded(1, 4, seed=seed)))


class Growing(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.h = torch.cat([self.h, x])
        return self.linear(self.h).sum(0)


class WritesItsParameter(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.5)
        return self.linear(x)


def test_what_no_write_can_stand_for_is_refused() -> None:
    with pytest.raises(CaptureError, match="the buffer h another size or dtype"):
        trace(Growing(), seeded(1, 4), dynamic=False)
    with pytest.raises(NeverCapturable, match=r"writes into the parameter linear\.weight"):
        trace(WritesItsParameter(), seeded(1, 4), dynamic=False)


class MadeOnce(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.empty is None:
            self.empty = torch.ones(4)
        width = x.shape[1]
        if width not in self.made:
            self.made[width] = torch.arange(width)
        self.width = width
        self.calls = 7
        return self.linear(x) + self.made[width] + self.empty


class Observed(Holding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.linear(x)
        return self.last * 2


def test_what_is_made_once_is_harmless_and_what_follows_the_inputs_is_noted() -> None:
    assert capture_report(trace(MadeOnce(), seeded(2, 4))).notes == ()
    notes = capture_report(trace(Observed(), seeded(2, 4))).notes
    assert notes == ("calls of the model set last, those of the graph do not",)


class Encoder(nn.Module):
    def __init__(self, pool: str, nested: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)
        self.pool = pool
        self.eval()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.encoder(x, src_key_padding_mask=mask)
        if self.pool == "mean":
            return (y * ~mask[..., None]).sum(1) / (~mask).sum(1, keepdim=True)
        return y


PADDED = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 1, 1]]).bool()


@pytest.mark.parametrize("mask", [PADDED, torch.zeros_like(PADDED)], ids=["padded", "full"])
def test_padding_where_nested_tensors_give_zeros_is_refused(mask: torch.Tensor) -> None:
    with pytest.raises(CaptureError, match="enable_nested_tensor=False"):
        trace(Encoder("none"), seeded(2, 5, 8), mask, on_failure="partial", dynamic=False)


@pytest.mark.parametrize("model", [Encoder("mean"), Encoder("none", nested=False)], ids=["unread", "not nested"])
def test_padding_that_makes_no_difference_is_captured(model: Encoder) -> None:
    x = seeded(2, 5, 8)
    captured = trace(model, x, torch.zeros_like(PADDED), dynamic=False)
    with torch.no_grad():
        assert torch.allclose(captured(x, PADDED), model(x, PADDED), atol=1e-5)


class Changing(Holding):
    """Changes everything it holds."""

    class Box:
        def __init__(self) -> None:
            self.value = torch.zeros(2)

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4).train()
        self.embedding = nn.Embedding(3, 4, max_norm=0.1)
        self.list: list[Any] = [[1], torch.zeros(2)]
        self.queue: collections.deque[int] = collections.deque([1, 2], maxlen=2)
        self.box = self.Box()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x) + self.embedding(torch.tensor([0]))
        self.h.add_(1)
        self.g = self.g + 1
        self.empty = torch.ones(1)
        self.plain.add_(1)
        self.register_buffer("new", torch.ones(1))
        self.linear.weight.data = self.linear.weight.data * 2
        self.linear.bias = nn.Parameter(torch.ones(4))
        self.list[0].append(2)
        self.list[1].add_(1)
        self.list = [*self.list, 3]
        self.queue.append(3)
        self.made["key"] = x
        self.box.value = self.box.value + 1
        self.box.value.mul_(2)
        self.calls += 1
        self.train()
        vars(self).pop("last", None)
        return self.linear(x) + torch.rand(1)


def test_everything_is_put_back() -> None:
    model = Changing()
    reference = copy.deepcopy(model)
    objects = {id(t) for t in (*model.parameters(), *model.buffers())}
    weight, attributes = model.linear.weight.data_ptr(), {k: id(v) for k, v in vars(model).items()}
    random_state = torch.random.get_rng_state()
    with untouched(model) as state:
        model(seeded(3, 4))
        model(seeded(3, 4))
        changed = state.changes()
    assert {"h", "g", "empty", "plain", "new", "linear.weight", "list", "queue", "box", "calls"} <= changed.keys()
    assert {"norm.running_mean", "norm.num_batches_tracked", "embedding.weight", "training"} <= changed.keys()
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert objects == {id(t) for t in (*model.parameters(), *model.buffers())}
    assert model.linear.weight.data_ptr() == weight
    assert {k: id(v) for k, v in vars(model).items()} == attributes
    for name, value in reference.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])
    assert list(model.state_dict()) == list(reference.state_dict())
    assert model.list[0] == [1] and torch.equal(model.list[1], torch.zeros(2)) and len(model.list) == 2
    assert list(model.queue) == [1, 2] and model.made == {} and torch.equal(model.box.value, torch.zeros(2))
    assert [m.training for m in model.modules()] == [m.training for m in reference.modules()]
    assert torch.equal(model.plain, torch.zeros(1, 4)) and model.last is None and model.empty is None


def test_nothing_is_written_where_nothing_changed() -> None:
    model = Holding()
    versions = {name: t._version for name, t in model.state_dict(keep_vars=True).items()}
    with untouched(model) as state:
        assert state.changes() == {}
    assert versions == {name: t._version for name, t in model.state_dict(keep_vars=True).items()}


def test_a_copied_call_shares_nothing_that_can_be_written() -> None:
    x = seeded(2)
    batch = {"x": x, "again": x, "rows": [x.clone()], "pair": torch.stack([x, x]).max(0), "name": "n"}
    call = CallArguments((batch,), {"extra": (x, collections.OrderedDict(a=x))}).copy()
    args, kwargs = call.args, call.kwargs
    args[0]["y"] = 1
    args[0]["rows"].append(1)
    args[0]["x"].add_(1)
    assert args[0]["again"] is args[0]["x"] is kwargs["extra"][0] is kwargs["extra"][1]["a"]
    assert "y" not in batch and len(batch["rows"]) == 1 and torch.equal(x, seeded(2))
    assert type(args[0]["pair"]) is torch.return_types.max and type(kwargs["extra"][1]) is collections.OrderedDict


def test_a_copied_call_copies_what_transformers_gives() -> None:
    transformers = pytest.importorskip("transformers")
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=seeded(2))
    encoding = transformers.BatchEncoding({"input_ids": seeded(2)})
    made, encoded = CallArguments((output, encoding)).copy().args
    assert type(made) is type(output) and made["last_hidden_state"] is made.last_hidden_state
    assert made.last_hidden_state is not output.last_hidden_state
    encoded["mask"] = 1
    assert type(encoded) is type(encoding) and list(encoding) == ["input_ids"]
    assert encoded["input_ids"] is not encoding["input_ids"]
