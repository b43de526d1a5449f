"""A dozen small models that stand for the zoo: each entry makes a model in eval mode and its example inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from torch.fx import GraphModule

import refold

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

SMALL: dict[str, int] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
}


def tokens(batch: int = 1, length: int = 7) -> torch.Tensor:
    return torch.randint(5, 90, (batch, length), generator=torch.Generator().manual_seed(batch * 100 + length))


def image(batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(batch))


def _text() -> dict[str, torch.Tensor]:
    ids = tokens(2)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def bert() -> Made:
    return transformers.BertModel(transformers.BertConfig(vocab_size=99, **SMALL)), (), _text()


def llama() -> Made:
    config = transformers.LlamaConfig(vocab_size=99, num_key_value_heads=2, tie_word_embeddings=True, **SMALL)
    return transformers.LlamaForCausalLM(config), (tokens(),), {}


def gpt2() -> Made:
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, **ends)
    return transformers.GPT2LMHeadModel(config), (), {"input_ids": tokens()}


def t5_encoder() -> Made:
    config = transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    return transformers.T5EncoderModel(config), (), _text()


def clip_text() -> Made:
    config = transformers.CLIPTextConfig(vocab_size=99, bos_token_id=1, eos_token_id=2, **SMALL)
    return transformers.CLIPTextModel(config), (), _text()


def whisper_encoder() -> Made:
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37}
    layers = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "num_mel_bins": 8, "max_source_positions": 20}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = transformers.WhisperModel(transformers.WhisperConfig(vocab_size=99, **layers, **heads, **ends))
    return model.encoder, (torch.randn(1, 8, 40, generator=torch.Generator().manual_seed(0)),), {}


def vit() -> Made:
    return transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **SMALL)), (image(),), {}


def resnet() -> Made:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    return transformers.ResNetModel(config), (image(),), {}


def mobilenet_v2() -> Made:
    config = transformers.MobileNetV2Config(image_size=32, depth_multiplier=0.25)
    return transformers.MobileNetV2Model(config), (), {"pixel_values": image()}


def gemma() -> Made:
    config = transformers.GemmaConfig(vocab_size=99, num_key_value_heads=2, head_dim=8, **SMALL)
    return transformers.GemmaModel(config), (tokens(),), {}


def torch_encoder() -> Made:
    layer = nn.TransformerEncoderLayer(32, 4, 37, batch_first=True)
    return nn.TransformerEncoder(layer, 2), (torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0)),), {}


class ConvNet(nn.Module):
    """A plain convolutional net that calls one module twice and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.again = nn.Conv2d(8, 8, 1)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 4)
        self.spare = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        features = self.relu(self.norm(self.conv(x)))
        features = self.again(self.again(features)) * scale
        return {"features": features, "logits": self.head(self.pool(features).flatten(1))}


def conv_net() -> Made:
    return ConvNet(), (image(),), {}


FAMILIES: dict[str, Callable[[], Made]] = {
    f.__name__: f
    for f in (
        bert,
        llama,
        gpt2,
        t5_encoder,
        clip_text,
        whisper_encoder,
        vit,
        resnet,
        mobilenet_v2,
        gemma,
        torch_encoder,
        conv_net,
    )
}


def make(name: str) -> Made:
    torch.manual_seed(0)
    model, args, kwargs = FAMILIES[name]()
    return model.eval(), args, kwargs


@functools.cache
def captured_of(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], GraphModule]:
    """A family with its graph, captured once: tests only read them, or work on copies."""
    model, args, kwargs = make(name)
    return model, args, kwargs, refold.trace(model, *args, **kwargs)
