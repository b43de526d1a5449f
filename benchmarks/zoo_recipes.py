"""What no rule can know about single families of transformers: settings and inputs that make a tiny one run."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from refold.capture.example_inputs import DummyInputs

Maker = Callable[[DummyInputs], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings by path into the configuration, inputs by name (None: the usual one), and what else must be done."""

    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inputs: Mapping[str, Maker | None] | None = None
    prepare: Callable[[Any], None] | None = None
    not_here: str = ""


def tiny_resnet(stages: int = 1) -> dict[str, Any]:
    """A backbone of transformers' own, where the default is one of timm."""
    return {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 8, 16, 16],
        "depths": [1, 1, 1, 1],
        "layer_type": "basic",
        "out_features": [f"stage{i}" for i in range(5 - min(stages, 4), 5)],
    }


def packed_images(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Two images as one row of patches with their grids, where the model asks for ``grid_thw``."""
    parameters = inspect.signature(model.forward).parameters
    if "grid_thw" not in parameters:
        return
    dummies = DummyInputs(model)
    channels = dummies.setting("in_channels", "in_chans", "num_channels", default=3)
    patch = dummies.setting("patch_size", default=14)
    width = channels * dummies.setting("temporal_patch_size", default=1) * patch * patch
    grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
    rest = {"grid_thw": grid} | ({"merge_sizes": torch.tensor([2, 2])} if "merge_sizes" in parameters else {})
    main = next(iter(parameters))
    yield {main: dummies.floats(32, width), **rest}
    yield {main: dummies.floats(32, channels, patch, patch), **rest}


def _mrope(sections: tuple[int, int, int] = (2, 1, 1), **more: Any) -> dict[str, Any]:
    """Rotary positions in three axes, for heads of twice the sum of the sections."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)} | more


def floats(*sizes: int) -> Maker:
    return lambda d: d.floats(d.batch, *sizes)


def whole(high: int, *sizes: int) -> Maker:
    """Whole numbers below ``high``."""
    return lambda d: torch.randint(high, (d.batch, *sizes), generator=d.generator)


def ones(*sizes: int, dtype: torch.dtype = torch.int64) -> Maker:
    return lambda d: torch.ones(d.batch, *sizes, dtype=dtype)


def series(past: int = 15, lags: int = 7, future: int = 4, **settings: Any) -> Recipe:
    """A forecaster: values and features of the past, features of the future."""
    return Recipe(
        {
            "prediction_length": future,
            "context_length": past - lags,
            "lags_sequence": [1, 2, lags],
            "num_time_features": 2,
            **settings,
        },
        {
            "past_values": floats(past),
            "past_time_features": floats(past, 2),
            "past_observed_mask": ones(past, dtype=torch.float32),
            "future_values": floats(future),
            "future_time_features": floats(future, 2),
        },
    )


_IMAGE = {"image_token_id": 10, "video_token_id": 11, "vision_start_token_id": 12, "vision_end_token_id": 13}


def _with_image(before: int = 2, tokens: int = 4) -> Mapping[str, Maker | None]:
    """A text with one image of 4 x 4 patches in each row: ids, patches, grids, and which tokens are the image's."""

    def ids(d: DummyInputs) -> torch.Tensor:
        text = d.tokens() % 50 + 20
        text[:, before : before + tokens] = 10
        return text

    def kinds(d: DummyInputs) -> torch.Tensor:
        return (ids(d) == 10).int()

    def patches(d: DummyInputs) -> torch.Tensor:
        vision = d.model.config.vision_config
        channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
        return d.floats(16 * d.batch, channels * vision.temporal_patch_size * vision.patch_size**2)

    def grid(d: DummyInputs) -> torch.Tensor:
        return torch.tensor([[1, 4, 4]] * d.batch)

    return {"input_ids": ids, "pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": kinds}


_TIMM = "a container for models of timm"
_TEXT = {"input_ids": None, "attention_mask": None}

RECIPES: dict[str, Recipe] = {
    "timm_backbone": Recipe(not_here=_TIMM),
    "timm_wrapper": Recipe(not_here=_TIMM),
    "gemma3n_vision": Recipe(not_here=_TIMM),
    "fast_vlm": Recipe(not_here="its vision tower is one of timm"),
    "pe_audio_video": Recipe(not_here="its vision tower is one of timm"),
    "dinat": Recipe(not_here="needs the package natten"),
    "bark": Recipe(not_here="a container whose forward is not implemented"),
    "evolla": Recipe(not_here="AutoModel does not know its configuration"),
    "layoutlmv2": Recipe(not_here="needs the package detectron2"),
    "inkling_mm_model": Recipe(not_here="needs the package scipy"),
    "pe_audio_video_encoder": Recipe(not_here="its vision tower is one of timm"),
    "glm_image_vqmodel": Recipe(not_here="a part whose forward is not implemented"),
    "musicgen_melody": Recipe(not_here="its class takes the decoder's configuration, not the one AutoModel gives it"),
    "voxtral_realtime_text": Recipe(not_here="transformers does not export its class"),
    "autoformer": series(label_length=4),
    "informer": series(),
    "time_series_transformer": series(),
    "patchtsmixer": Recipe(
        {"context_length": 32, "patch_length": 8, "patch_stride": 8, "num_input_channels": 2, "d_model": 8},
        {"past_values": floats(32, 2)},
    ),
    "decision_transformer": Recipe(
        {"hidden_size": 32, "n_layer": 1},
        {
            "states": floats(8, 17),
            "actions": floats(8, 4),
            "rewards": floats(8, 1),
            "returns_to_go": floats(8, 1),
            "timesteps": whole(20, 8),
            "attention_mask": ones(8),
        },
    ),
    "blip_2_qformer": Recipe(
        {"encoder_hidden_size": 32, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2},
        {"query_embeds": floats(4, 32), "encoder_hidden_states": floats(6, 32)},
    ),
    "esm": Recipe({"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32}),
    "esmc": Recipe({"vocab_size": 64, "pad_token_id": 1, "head_dim": 8}),
    "xmod": Recipe({"languages": ["en_XX"], "default_language": "en_XX"}),
    "deepseek_v2": Recipe({"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1}),
    "dac": Recipe({}, {"input_values": floats(1, 2048)}),
    "dia": Recipe({}, {"input_ids": None, "decoder_input_ids": whole(50, 8, 9)}),
    "mamba2": Recipe({"hidden_size": 32, "num_heads": 8, "head_dim": 8, "expand": 2, "state_size": 8, "n_groups": 1}),
    "ministral": Recipe({"head_dim": 8}),
    "hunyuan_v1_dense": Recipe({"head_dim": 8}),
    "chameleon": Recipe(
        {"vocabulary_map": {"<image>": 5, "IMGIMGBS": 6, "IMGIMGBA": 7}, "vq_config.base_channels": 32},
        _TEXT,
    ),
    "clap": Recipe(
        {
            "audio_config.spec_size": 64,
            "audio_config.depths": [1, 1],
            "audio_config.num_attention_heads": [2, 2],
            "audio_config.num_hidden_layers": 2,
            "audio_config.patch_embeds_hidden_size": 16,
            "audio_config.hidden_size": 32,
            "audio_config.window_size": 4,
            "audio_config.num_mel_bins": 16,
            "audio_config.patch_size": 4,
            "audio_config.patch_stride": [4, 4],
        },
        {"input_ids": None, "attention_mask": None, "input_features": floats(1, 60, 16)},
    ),
    "qwen2_vl": Recipe({**_IMAGE, "vision_config.hidden_size": 32, "vision_config.embed_dim": 32}, _with_image()),
    "qwen2_vl_text": Recipe({"rope_parameters": _mrope()}, _TEXT),
    "qwen2_5_vl": Recipe({**_IMAGE, "vision_config.out_hidden_size": 32}, _with_image()),
    "glm4v": Recipe({**_IMAGE, "vision_config.out_hidden_size": 32}, _with_image()),
    "glm46v": Recipe({"text_config.rope_parameters": _mrope()}, _TEXT),
    "glm_image": Recipe({"text_config.rope_parameters": _mrope()}, _TEXT),
    "glm4v_moe_text": Recipe({"rope_parameters": _mrope()}, _TEXT),
    "qwen2_5_omni_thinker": Recipe(
        {"text_config.rope_parameters": _mrope(), "vision_start_token_id": 7, "vision_end_token_id": 8}, _TEXT
    ),
    "glm4v_moe": Recipe({"text_config.rope_parameters": _mrope(), "text_config.head_dim": 16}, _TEXT),
    "glmga": Recipe({"text_config.rope_parameters": _mrope()}, _TEXT),
    "paligemma": Recipe({}, {**_TEXT, "token_type_ids": None}),  # without them eager and traced masks differ
    "laguna": Recipe({"num_attention_heads_per_layer": [4, 4], "num_attention_heads": 4, "head_dim": 8}),
    "helium": Recipe({"head_dim": 8}),
    "hunyuan_vl": Recipe({"text_config.head_dim": 8, "text_config.rope_parameters": _mrope()}, _TEXT),
    "zamba2": Recipe({"num_mem_blocks": 1, "hybrid_layer_ids": [0, 1], "attention_hidden_size": 64}),
    "emu3": Recipe({"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6, "<|visual token 000000|>": 7}}, _TEXT),
    "kosmos-2": Recipe(
        {"latent_query_num": 4},
        {
            "pixel_values": None,
            "input_ids": None,
            "image_embeds_position_mask": lambda d: torch.tensor([0, 1, 1, 1, 1, 0, 0, 0]).expand(d.batch, 8).clone(),
        },
    ),
    "lxmert": Recipe({}, {**_TEXT, "visual_feats": None, "visual_pos": None}),
    "mimi_decoder": Recipe({"upsample_groups": 32}),
    "csm": Recipe({"codec_config.upsample_groups": 32}),
    "speecht5": Recipe({}, {"input_values": floats(8, 32), "decoder_input_values": floats(8, 32)}),
    "pe_audio_encoder": Recipe({}, {"input_values": floats(1, 4000)}),
    "granite_speech5_encoder": Recipe({}, {"input_features": floats(40, 320)}),
    "audioflamingo3_encoder": Recipe({}, {"input_features": None, "input_features_mask": ones(1024)}),
    "pp_ocrv5_mobile_rec": Recipe({}, {"pixel_values": floats(3, 48, 160)}),
    "d_fine": Recipe({"head_dim": 8, "num_queries": 8}, {"pixel_values": floats(3, 64, 64)}),
    "deimv2": Recipe({"head_dim": 8, "num_queries": 8}, {"pixel_values": floats(3, 64, 64)}),
    "bailing_hybrid": Recipe({"n_group": 1, "topk_group": 1, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "cohere_compass_text": Recipe({"rope_parameters": {k: _mrope() for k in ("full_attention", "sliding_attention")}}),
    "cohere_compass": Recipe(
        {"text_config.rope_parameters": {k: _mrope() for k in ("full_attention", "sliding_attention")}}, _TEXT
    ),
    "deepseek_ocr2": Recipe(
        {"text_config.mlp_layer_types": ["dense"], "text_config.num_hidden_layers": 1, "text_config.head_dim": 8},
        _TEXT,
    ),
    "diffusion_gemma": Recipe(
        {
            "text_config.num_experts": 4,
            "text_config.top_k_experts": 2,
            "text_config.moe_intermediate_size": 16,
        }
    ),
    "gemma3n_text": Recipe(
        {
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.0, 0.0],
            "vocab_size_per_layer_input": 200,
        }
    ),
    "glm5_next": Recipe({"text_config.index_topk": 16}, _TEXT),
    "nemotron_h": Recipe({"n_groups": 1, "mamba_num_heads": 4, "mamba_head_dim": 16}),
    "step3p7": Recipe({"text_config.sliding_window": 4}, _TEXT),
    "tvp": Recipe(
        {"max_img_size": 64, "visual_prompt_size": 8, "num_frames": 2},
        {"input_ids": None, "attention_mask": None, "pixel_values": floats(2, 3, 64, 64)},
    ),
    "blip-2": Recipe({"image_token_index": 5}, None),
    "oneformer": Recipe({}, {"pixel_values": floats(3, 64, 64), "task_inputs": whole(50, 77)}),
    "sam": Recipe(
        {
            "vision_config.image_size": 64,
            "vision_config.output_channels": 32,
            "vision_config.num_pos_feats": 16,
            "vision_config.window_size": 2,
            "vision_config.global_attn_indexes": [0],
            "vision_config.mlp_dim": 64,
            "prompt_encoder_config.image_size": 64,
            "prompt_encoder_config.image_embedding_size": 4,
            "prompt_encoder_config.hidden_size": 32,
            "mask_decoder_config.hidden_size": 32,
            "mask_decoder_config.mlp_dim": 32,
            "mask_decoder_config.num_attention_heads": 2,
            "mask_decoder_config.iou_head_hidden_dim": 32,
        },
        {"pixel_values": floats(3, 64, 64), "input_points": floats(1, 1, 2)},
    ),
    "sam2_hiera_det_model": Recipe(
        {
            "image_size": [64, 64],
            "blocks_per_stage": [1, 1, 2, 1],
            "embed_dim_per_stage": [8, 16, 32, 64],
            "num_attention_heads_per_stage": [1, 1, 2, 2],
            "window_size_per_stage": [8, 4, 4, 4],
            "global_attention_blocks": [3],
            "hidden_size": 8,
            "window_positional_embedding_background_size": [4, 4],
        },
        {"pixel_values": floats(3, 64, 64)},
    ),
    "pixtral": Recipe({"image_size": 64}, {"pixel_values": floats(3, 64, 64)}),
}
RECIPES["sam_hq"] = Recipe(
    {**RECIPES["sam"].settings, "mask_decoder_config.vit_dim": 32, "vision_config.hidden_size": 32},
    RECIPES["sam"].inputs,
)
