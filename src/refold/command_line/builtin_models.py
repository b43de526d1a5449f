"""Built-in examples: real architectures with random weights, made offline from their configurations."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from refold.command_line.transformers_models import config_from, model_from
from refold.errors import WrongInput


@dataclass(frozen=True)
class Example:
    """A model that can be made anywhere, the same in every process."""

    name: str
    about: str
    make: Callable[[], nn.Module]
    image_size: int = 224
    inputs: Callable[[], dict[str, torch.Tensor]] | None = None
    """Inputs of its own, where those that a configuration tells would not show what there is to see."""

    def build(self) -> nn.Module:
        """The model in eval mode; the random state of the caller is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(self.name.encode()))
            model = self.make()
            _draw_statistics(model)
        return model.eval()


def example_named(name: str) -> Example:
    """The example of that name; a name that does not exist is refused with the names that do."""
    if name not in EXAMPLES:
        raise WrongInput(f"There is no example {name!r}. There are: {', '.join(EXAMPLES)}.")
    return EXAMPLES[name]


def _draw_statistics(model: nn.Module) -> None:
    """Batch norms as after training: folding one with mean 0 and variance 1 would show nothing."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            nn.init.normal_(module.running_mean, 0, 0.2)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 1.5)  # type: ignore[arg-type]
            nn.init.uniform_(module.weight, 0.7, 1.3)
            nn.init.normal_(module.bias, 0, 0.1)


class TinyBlock(nn.Module):
    """Attention and two linear layers, written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (self._split(layer(y)) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Tiny(nn.Module):
    """A small image classifier in plain torch: convolutions with batch norm, then two attention blocks."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        )  # fmt: skip
        self.blocks = nn.Sequential(TinyBlock(width, 4), TinyBlock(width, 4))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, classes)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        tokens = self.stem(pixel_values).flatten(2).transpose(1, 2)
        return self.head(self.dropout(self.blocks(tokens).mean(1) / 2.0))


def _sentences(count: int = 32, longest: int = 128) -> dict[str, torch.Tensor]:
    """A batch of sentences as they arrive: lengths are log-normal with a median of 37 tokens, padded to the longest."""
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    lengths = torch.tensor([min(longest, max(4, round(draw.lognormvariate(3.61, 0.6)))) for _ in range(count)])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    return {"input_ids": torch.randint(5, 30000, mask.shape, generator=generator) * mask, "attention_mask": mask}


def _transformers(model_type: str, class_name: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: model_from(config_from({"model_type": model_type, **settings}), class_name)


_LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
    "use_cache": False,
}
_WHISPER = {"d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536} | {
    "decoder_layers": 4,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 1536,
    "use_cache": False,
}

_SENTENCES = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}

_ALL = (
    Example("tiny", "convolutions, batch norm and attention in plain torch, 0.1 M weights", Tiny, image_size=32),
    Example(
        "sentence-classifier",
        "text classifier of 6 layers, 22 M weights, with 32 sentences of natural lengths",
        _transformers("bert", "BertForSequenceClassification", **_SENTENCES),
        inputs=_sentences,
    ),
    Example("bert-base", "text encoder, 109 M weights", _transformers("bert", "BertModel")),
    Example("distilbert", "text encoder, 66 M weights", _transformers("distilbert", "DistilBertModel")),
    Example("gpt2", "text decoder, 124 M weights", _transformers("gpt2", "GPT2Model", use_cache=False)),
    Example("llama-small", "text decoder, 98 M weights", _transformers("llama", "LlamaModel", **_LLAMA)),
    Example("t5-small", "encoder and decoder, 60 M weights", _transformers("t5", "T5Model", use_cache=False)),
    Example("vit-base", "image encoder, 86 M weights", _transformers("vit", "ViTModel")),
    Example("resnet50", "image encoder, 24 M weights", _transformers("resnet", "ResNetModel")),
    Example("mobilenet-v2", "image encoder, 2.2 M weights", _transformers("mobilenet_v2", "MobileNetV2Model")),
    Example("convnext-tiny", "image encoder, 28 M weights", _transformers("convnext", "ConvNextModel")),
    Example("whisper-tiny", "speech to text, 38 M weights", _transformers("whisper", "WhisperModel", **_WHISPER)),
)
EXAMPLES: dict[str, Example] = {example.name: example for example in _ALL}
