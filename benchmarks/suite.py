"""The models that are benchmarked: made from configurations with random weights, nothing is downloaded."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Inputs = dict[str, torch.Tensor]
Maker = Callable[[int, bool], tuple[nn.Module, Inputs]]


@dataclass(frozen=True)
class Case:
    """One row of the benchmark: a model at a batch size on a device."""

    model: str
    batch: int
    device: str
    make: Maker

    @property
    def name(self) -> str:
        return f"{self.model} b{self.batch}"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def build(self) -> tuple[nn.Module, Inputs]:
        """The model in eval mode and its inputs. The same seed gives the same numbers in every process."""
        torch.manual_seed(zlib.crc32(self.name.encode()))
        model, inputs = self.make(self.batch, self.device == "cuda")
        draw_batch_norm_statistics(model)
        model = model.to(self.device, self.dtype).eval().requires_grad_(False)
        return model, {name: self._place(value) for name, value in inputs.items()}

    def _place(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)


def draw_batch_norm_statistics(model: nn.Module) -> None:
    """Statistics and affine weights that differ from the defaults: a fold that ignores one of them must show."""
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        assert module.running_mean is not None and module.running_var is not None
        module.running_mean.normal_(0, 0.2)
        module.running_var.uniform_(0.5, 1.5)
        if module.affine:
            nn.init.uniform_(module.weight, 0.7, 1.3)
            nn.init.normal_(module.bias, 0, 0.1)


def tokens(batch: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(1, vocabulary, (batch, length))


def make_bert(batch: int, big: bool) -> tuple[nn.Module, Inputs]:
    from transformers import BertConfig, BertModel

    ids = tokens(batch, 128, 30000)
    return BertModel(BertConfig()), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def make_vit(batch: int, big: bool) -> tuple[nn.Module, Inputs]:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig()), {"pixel_values": torch.randn(batch, 3, 224, 224)}


def make_gpt2(batch: int, big: bool) -> tuple[nn.Module, Inputs]:
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config(use_cache=False)), {"input_ids": tokens(batch, 128, 50000)}


def make_llama(batch: int, big: bool) -> tuple[nn.Module, Inputs]:
    """The 1.1 B shape on a GPU, 8 layers of width 1024 on a CPU."""
    from transformers import LlamaConfig, LlamaModel

    small_shape = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 8000,
    }
    big_shape = {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    }
    config = LlamaConfig(use_cache=False, **(big_shape if big else small_shape))
    length = (16 if batch == 1 else 512) if big else 32
    return LlamaModel(config), {"input_ids": tokens(batch, length, config.vocab_size)}


def make_t5_encoder(batch: int, big: bool) -> tuple[nn.Module, Inputs]:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12)
    return T5EncoderModel(config), {"input_ids": tokens(batch, 128, 32000)}


def make_clip_text(batch: int, big: bool) -> tuple[nn.Module, Inputs]:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig()
    ids = tokens(batch, 77, 49000)
    ids[:, -1] = config.eos_token_id or 2
    return CLIPTextModel(config), {"input_ids": ids}


def make_whisper_encoder(batch: int, big: bool) -> tuple[nn.Module, Inputs]:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    size = {"d_model": 512, "encoder_layers": 6, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048}
    return WhisperEncoder(WhisperConfig(**size)), {"input_features": torch.randn(batch, 80, 3000)}


def make_resnet50(batch: int, big: bool) -> tuple[nn.Module, Inputs]:
    from transformers import ResNetConfig, ResNetModel

    return ResNetModel(ResNetConfig()), {"pixel_values": torch.randn(batch, 3, 224, 224)}


def make_mobilenet_v2(batch: int, big: bool) -> tuple[nn.Module, Inputs]:
    from transformers import MobileNetV2Config, MobileNetV2Model

    return MobileNetV2Model(MobileNetV2Config()), {"pixel_values": torch.randn(batch, 3, 224, 224)}


def make_efficientnet_b0(batch: int, big: bool) -> tuple[nn.Module, Inputs]:
    """The library's defaults are those of B7; B0 has neither the wider channels nor the deeper stages."""
    from transformers import EfficientNetConfig, EfficientNetModel

    config = EfficientNetConfig(width_coefficient=1.0, depth_coefficient=1.0, image_size=224, hidden_dim=1280)
    return EfficientNetModel(config), {"pixel_values": torch.randn(batch, 3, 224, 224)}


def make_levit(batch: int, big: bool) -> tuple[nn.Module, Inputs]:
    """LeViT-256."""
    from transformers import LevitConfig, LevitModel

    config = LevitConfig(hidden_sizes=[256, 384, 512], num_attention_heads=[4, 6, 8], key_dim=[32, 32, 32])
    return LevitModel(config), {"pixel_values": torch.randn(batch, 3, 224, 224)}


# model name -> (maker, large batch on CPU, large batch on CUDA)
MODELS: dict[str, tuple[Maker, int, int]] = {
    "bert-base": (make_bert, 8, 32),
    "vit-b": (make_vit, 8, 64),
    "gpt2": (make_gpt2, 8, 32),
    "llama": (make_llama, 8, 8),
    "t5-encoder": (make_t5_encoder, 8, 32),
    "clip-text": (make_clip_text, 8, 64),
    "whisper-encoder": (make_whisper_encoder, 4, 16),
    "resnet50": (make_resnet50, 8, 64),
    "mobilenet-v2": (make_mobilenet_v2, 16, 128),
    "efficientnet-b0": (make_efficientnet_b0, 16, 128),
    "levit": (make_levit, 16, 256),
}


def cases(device: str, only: list[str] | None = None) -> list[Case]:
    """Every model at batch 1 and at its large batch; `only` keeps those whose name contains one of its entries."""
    rows = [
        Case(name, batch, device, make)
        for name, (make, cpu_batch, cuda_batch) in MODELS.items()
        for batch in (1, cuda_batch if device == "cuda" else cpu_batch)
    ]
    if not only:
        return rows
    wanted = [row for row in rows if any(part == row.name or part == row.model for part in only)]
    if not wanted:
        raise SystemExit(f"No case is called {only}. There are: {', '.join(row.name for row in rows)}.")
    return wanted


def call(model: Callable[..., Any], inputs: Inputs) -> Any:
    with torch.no_grad():
        return model(**inputs)
