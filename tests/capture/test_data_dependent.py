"""Data-dependent control flow: inputs and buffers fixed to their values, loops over what a mask hits opened."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from capture_models import seeded
from torch import nn

from refold.capture.tracing import capture_report, trace
from refold.errors import CaptureError, InputMismatch


def tokens(*sizes: int, high: int = 20) -> torch.Tensor:
    return torch.randint(high, sizes, generator=torch.Generator().manual_seed(1))


class Experts(nn.Module):
    """A router, and a loop over those experts that some token goes to."""

    def __init__(self, skip_empty: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)
        self.router = nn.Linear(4, 5)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
        self.skip_empty = skip_empty

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids).flatten(0, 1)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        result = torch.zeros_like(x)
        hits = nn.functional.one_hot(chosen, 5).permute(2, 1, 0)
        candidates = range(5) if self.skip_empty else torch.greater(hits.sum(dim=(-1, -2)), 0).nonzero()
        for expert in candidates:
            place, token = torch.where(hits[expert].reshape(2, -1))
            if self.skip_empty and token.shape[0] == 0:
                continue
            result.index_add_(0, token, self.experts[int(expert)](x[token]) * weights[token, place, None])
        return result


@pytest.mark.parametrize("skip_empty", [False, True])
def test_a_loop_over_the_experts_that_are_hit_runs_over_all(skip_empty: bool) -> None:
    model = Experts(skip_empty).eval()
    reference = copy.deepcopy(model)
    captured = trace(model, tokens(2, 6))
    report = capture_report(captured)

    assert {f"experts.{i}" for i in range(5)} <= set(report.raised)
    assert report.dynamic["ids"] == (0, 1)
    one_token = torch.full((3, 7), 4)
    for ids in (tokens(2, 6), tokens(5, 9), one_token):
        with torch.no_grad():
            hit = torch.unique(reference.router(reference.table(ids)).topk(2).indices)
            assert torch.equal(captured(ids), reference(ids))
    assert len(hit) < 5, "the last example must leave some experts without tokens"


class PackedExperts(nn.Module):
    """Experts over packed images: a grid that is fixed and a loop that is opened, in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, ids: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        x = self.experts(ids)
        return torch.stack([part.sum(0) if len(part) > 4 else part.mean(0) for part in x.split(grid.prod(-1).tolist())])


def test_fixing_and_opening_go_together() -> None:
    model = PackedExperts().eval()
    reference, grid = copy.deepcopy(model), torch.tensor([[4, 2], [2, 2]])
    captured = trace(model, tokens(2, 6), grid)
    notes = str(capture_report(captured))
    assert "grid is fixed" in notes and "a loop over" in notes
    with torch.no_grad():
        assert torch.equal(captured(torch.full((2, 6), 3), grid), reference(torch.full((2, 6), 3), grid))


class CountsTheHit(Experts):
    """Here elements that are not hit do change the result, so the loop must not be opened."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hits = nn.functional.one_hot(ids.flatten(), 20).sum(0)
        result = self.table(ids).sum()
        for number in torch.greater(hits, 0).nonzero():
            result = result + number[0]
        return result


def test_a_loop_in_which_the_others_matter_is_not_opened() -> None:
    with pytest.raises(CaptureError, match="not the model"):
        trace(CountsTheHit().eval(), tokens(2, 6))


class Windows(nn.Module):
    """Images packed in one row, cut by what ``grid`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, patches: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        x = self.project(patches)
        cuts = torch.cat([grid.new_zeros(1), grid.prod(-1).cumsum(0)])
        parts, seen = [], grid[0, 0] * 0
        for i, (height, width) in enumerate(grid.tolist()):
            part = x[cuts[i] : cuts[i + 1]].view(height, width, 4)
            parts.append((part.mean((0, 1)) if height > 2 else part.sum((0, 1))) + seen)
            seen += height  # in place: what was added before must not change
        return torch.stack(parts)


GRID = [[3, 2], [2, 2]]


def test_an_input_that_control_flow_depends_on_is_fixed_and_checked() -> None:
    model = Windows().eval()
    reference = copy.deepcopy(model)
    captured = trace(model, seeded(10, 4), torch.tensor(GRID))

    assert "grid is fixed" in str(capture_report(captured))
    assert "project" in capture_report(captured).raised
    buffer = io.BytesIO()
    torch.save(captured, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    other = 2 * seeded(10, 4)
    for graph in (captured, copy.deepcopy(captured), loaded):
        with torch.no_grad():
            assert torch.equal(graph(other, torch.tensor(GRID)), reference(other, torch.tensor(GRID)))
        with pytest.raises(InputMismatch, match=r"control flow depends on grid, which was \[\[3, 2\], \[2, 2\]\]"):
            graph(other, torch.tensor([[2, 3], [2, 2]]))


class Strided(nn.Module):
    """A convolution's geometry kept in buffers, as some audio codecs do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, stride=2)
        self.register_buffer("stride", torch.tensor(2), persistent=False)
        self.register_buffer("width", torch.tensor(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        missing = self.width - self.stride
        if x.shape[-1] % int(self.stride) != 0:
            missing = missing + 1
        return self.conv(nn.functional.pad(x, (missing, self.width - self.width)))


def test_a_buffer_that_control_flow_depends_on_is_fixed() -> None:
    model = Strided().eval()
    reference = copy.deepcopy(model)
    captured = trace(model, seeded(2, 1, 9))
    report = capture_report(captured)
    assert "the buffer width is fixed" in str(report) and report.raised == ("conv",)
    assert 0 in report.dynamic["x"]
    assert "_refold_from" not in vars(model.stride)
    with torch.no_grad():
        assert torch.equal(captured(seeded(5, 1, 9)), reference(seeded(5, 1, 9)))


class CountsCalls(nn.Module):
    """Its count decides what it does and is written to: a graph would count once and for all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.linear(x) if self.calls.item() < 3 else x


def test_a_buffer_that_is_written_to_is_not_fixed() -> None:
    model = CountsCalls().eval()
    with pytest.raises(CaptureError, match="control flow depends"):
        trace(model, seeded(2, 4))
    assert model.calls == 0


def test_the_same_tensor_is_compared_once_and_again_after_a_write() -> None:
    grid = torch.tensor(GRID)
    captured = trace(Windows().eval(), seeded(10, 4), grid)
    captured(seeded(10, 4), grid)
    grid[0] = torch.tensor([2, 3])
    with pytest.raises(InputMismatch, match="control flow depends on grid"):
        captured(seeded(10, 4), grid)


class ReadsTheText(nn.Module):
    """The tokens themselves decide: a graph for one text would be of no use."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return x.sum(1) if ids[0, 0] > 3 else x.mean(1)


def test_data_is_never_fixed() -> None:
    with pytest.raises(CaptureError, match="control flow depends"):
        trace(ReadsTheText().eval(), tokens(2, 6))
