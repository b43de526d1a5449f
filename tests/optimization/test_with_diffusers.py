"""Parts of a diffusers pipeline that are replaced by optimized ones are used by it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import refold
from refold.errors import FellBack

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: pip install diffusers")

QUICK = {"backend": "plain", "effort": "quick", "progress": False}
BLOCKS = {"layers_per_block": 1, "block_out_channels": (4, 8), "norm_num_groups": 4}


@pytest.fixture(autouse=True)
def nothing_falls_back() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", FellBack)
        yield


def test_a_pipeline_runs_the_optimized_unet_at_every_step() -> None:
    torch.manual_seed(0)
    parts = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    unet = diffusers.UNet2DModel(sample_size=8, add_attention=False, **parts, **BLOCKS).eval()
    expected = images(diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(10)))
    fast: Any = refold.optimize(unet, (torch.randn(1, 3, 8, 8), torch.tensor(5)), **QUICK)
    pipe = diffusers.DDPMPipeline(fast, diffusers.DDPMScheduler(10))
    assert pipe.unet is fast and fast.config is unet.config and pipe.device == unet.device
    assert torch.allclose(images(pipe), expected, atol=1e-5)
    assert (fast.report.calls.fast, fast.report.calls.original) == (6, 0)


def images(pipe: Any) -> torch.Tensor:
    """Two images in three steps, from the same noise each time."""
    pipe.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(0)
    one, other = (pipe(generator=noise, num_inference_steps=3, output_type="np").images for _ in range(2))
    return torch.cat([torch.from_numpy(one), torch.from_numpy(other)])


def test_a_unet_is_prepared_for_the_way_in_which_pipelines_call_it() -> None:
    torch.manual_seed(0)
    parts = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    small = {"layers_per_block": 1, "block_out_channels": (4,), "norm_num_groups": 2, "attention_head_dim": 2}
    unet = diffusers.UNet2DConditionModel(
        sample_size=4, in_channels=2, out_channels=2, mid_block_type=None, cross_attention_dim=4, **parts, **small
    ).eval()
    latents, text = torch.randn(2, 2, 4, 4), torch.randn(2, 3, 4)
    example = {"sample": latents, "timestep": torch.tensor(5), "encoder_hidden_states": text, "return_dict": False}
    fast: Any = refold.optimize(unet, example, **QUICK)
    unused = dict.fromkeys(("timestep_cond", "cross_attention_kwargs", "added_cond_kwargs"))
    with torch.no_grad():  # as StableDiffusionPipeline does
        found = fast(latents, torch.tensor(7), encoder_hidden_states=text, **unused, return_dict=False)
        expected = unet(latents, torch.tensor(7), encoder_hidden_states=text, return_dict=False)
    assert torch.allclose(found[0], expected[0], atol=1e-5) and fast.report.calls.fast == 1


def test_a_decoder_inside_of_an_autoencoder_is_used() -> None:
    torch.manual_seed(0)
    parts = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    vae = diffusers.AutoencoderKL(latent_channels=4, sample_size=8, **parts, **BLOCKS).eval()
    latents, names = torch.randn(1, 4, 4, 4), list(vae.state_dict())
    with torch.no_grad():
        expected = vae.decode(latents).sample
        vae.decoder = refold.optimize(vae.decoder, (latents,), **QUICK)
        assert torch.allclose(vae.decode(latents).sample, expected, atol=1e-5)
    assert vae.decoder.report.calls.fast == 1 and list(vae.state_dict()) == names
