"""Images: `symbolic_trace` leaves open the sizes that the model leaves open, and says why others are not."""

from __future__ import annotations

from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.fx import GraphModule  # noqa: E402

import refold  # noqa: E402
from refold.capture.captured import why_refused  # noqa: E402


@pytest.fixture(scope="module")
def resnet() -> tuple[nn.Module, GraphModule]:
    torch.manual_seed(0)
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    model = transformers.ResNetModel(config).eval()
    return model, refold.symbolic_trace(model, input_names=["pixel_values"])


@pytest.mark.parametrize("shape", [(1, 3, 32, 32), (3, 3, 64, 48), (2, 3, 33, 35)])
@torch.no_grad()
def test_a_resnet_runs_at_other_sizes(resnet: tuple[nn.Module, GraphModule], shape: tuple[int, ...]) -> None:
    model, gm = resnet
    image = torch.randn(shape)
    expected, found = model(image), gm(pixel_values=image)
    assert torch.equal(found["last_hidden_state"], expected.last_hidden_state)
    assert torch.equal(found["pooler_output"], expected.pooler_output)


def test_it_is_saved_as_it_was_captured(resnet: tuple[nn.Module, GraphModule], tmp_path: Path) -> None:
    model, gm = resnet
    refold.save(gm, tmp_path / "saved")
    loaded = refold.load(tmp_path / "saved", model)
    assert why_refused(loaded, (torch.randn(2, 3, 48, 40),), {}) is None


class Positions(nn.Module):
    """Like a vision transformer: one embedding for each place of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, 4, 4, 4), nn.Parameter(torch.randn(1, 4, 4, 4))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.patches(pixel_values) + self.places


def test_what_the_model_fixes_is_said() -> None:
    gm = refold.trace(Positions().eval(), torch.randn(2, 3, 16, 16), dynamic="all")
    assert why_refused(gm, (torch.randn(5, 3, 16, 16),), {}) is None
    refused = str(why_refused(gm, (torch.randn(2, 3, 20, 16),), {}))
    assert "(pixel_values.shape[2] // 4) == 4" in refused and "self.patches(pixel_values) + self.places" in refused
