"""Text models on batches of natural lengths: made from configurations with random weights, nothing is downloaded."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from suite import Inputs
from torch import nn

LONGEST = 128
VOCABULARY = 30000
MINI = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}


def lengths(count: int, seed: int = 0) -> list[int]:
    """Tokens of sentences as people write them: log-normal, median 37, sigma 0.6, cut at 128."""
    draw = random.Random(seed)
    return [min(LONGEST, max(4, round(draw.lognormvariate(3.611, 0.6)))) for _ in range(count)]


def padded_to(share: float, count: int, seed: int = 0) -> list[int]:
    """Lengths of which about `share` of the grid is padding; 0 gives equal lengths."""
    draw = random.Random(seed)
    rest = [min(LONGEST, max(4, round(LONGEST * (1 - 2 * share * draw.random())))) for _ in range(count - 1)]
    return [LONGEST, *rest]


def batch(sizes: list[int], seed: int = 0, device: str = "cpu", vocabulary: int = VOCABULARY) -> Inputs:
    """Ids and a mask of sentences of these lengths, padded on the right to the longest."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]).long()
    ids = torch.randint(5, vocabulary, mask.shape, generator=generator)
    ids[:, 0] = 2
    return {"input_ids": torch.where(mask == 1, ids, 1).to(device), "attention_mask": mask.to(device)}


class MeanPooled(nn.Module):
    """A text encoder whose real tokens are averaged, as sentence embeddings are."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(states.dtype)
        return (states * weights).sum(1) / weights.sum(1)


class Scored(nn.Module):
    """The log-likelihood of each text under a causal language model: log-softmax and gather inside the model."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits = self.decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        scores = logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        return (scores * attention_mask[:, 1:]).sum(1)


@dataclass(frozen=True)
class TextModel:
    """A model that takes ids and a mask."""

    name: str
    make: Callable[[], nn.Module]
    held_out: bool = False
    """Nothing was tried on this model while the rewrites were written."""

    def build(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> nn.Module:
        """The same weights in every process, in eval mode."""
        torch.manual_seed(zlib.crc32(self.name.encode()))
        return self.make().to(device, dtype).eval().requires_grad_(False)


def _made(config: str, model: str, wrap: Callable[[nn.Module], nn.Module] | None = None, **settings: Any) -> Any:
    def make() -> nn.Module:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return made if wrap is None else wrap(made)

    return make


_T5 = {"d_model": 384, "d_kv": 32, "d_ff": 1536, "num_layers": 6, "num_heads": 12}
_DISTILBERT = {"dim": 384, "n_layers": 6, "n_heads": 12, "hidden_dim": 1536}
_GPT2 = {"n_embd": 384, "n_layer": 6, "n_head": 12, "vocab_size": VOCABULARY, "use_cache": False}
_LLAMA = MINI | {"num_key_value_heads": 4, "vocab_size": VOCABULARY, "use_cache": False, "pad_token_id": 1}
_OPT = {"hidden_size": 384, "word_embed_proj_dim": 384, "num_hidden_layers": 6, "num_attention_heads": 12} | {
    "ffn_dim": 1536,
    "vocab_size": VOCABULARY,
    "use_cache": False,
}
_RELATIVE = MINI | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_ROTARY = MINI | {"vocab_size": VOCABULARY, "pad_token_id": 1}

ENCODERS = (
    TextModel("bert-base", _made("BertConfig", "BertForSequenceClassification")),
    TextModel("bert", _made("BertConfig", "BertForSequenceClassification", **MINI)),
    TextModel("roberta", _made("RobertaConfig", "RobertaForSequenceClassification", **MINI)),
    TextModel("distilbert", _made("DistilBertConfig", "DistilBertForSequenceClassification", **_DISTILBERT)),
    TextModel("mpnet", _made("MPNetConfig", "MPNetForSequenceClassification", **MINI)),
    TextModel("modernbert", _made("ModernBertConfig", "ModernBertForSequenceClassification", **_ROTARY), held_out=True),
    TextModel("t5-encoder", _made("T5Config", "T5EncoderModel", MeanPooled, **_T5)),
    TextModel("minilm-mean", _made("BertConfig", "BertModel", MeanPooled, **MINI)),
    TextModel("roformer", _made("RoFormerConfig", "RoFormerForSequenceClassification", **_ROTARY), held_out=True),
    TextModel("esm", _made("EsmConfig", "EsmForSequenceClassification", **_ROTARY, position_embedding_type="rotary",
                           mask_token_id=4, max_position_embeddings=514), held_out=True),
)  # fmt: skip
RELATIVE = (
    TextModel("deberta", _made("DebertaConfig", "DebertaForSequenceClassification", **_RELATIVE)),
    TextModel("deberta-v2", _made("DebertaV2Config", "DebertaV2ForSequenceClassification", **_RELATIVE)),
)
DECODERS = (
    TextModel("gpt2", _made("GPT2Config", "GPT2LMHeadModel", Scored, **_GPT2)),
    TextModel("llama", _made("LlamaConfig", "LlamaForCausalLM", Scored, **_LLAMA)),
    TextModel("opt", _made("OPTConfig", "OPTForCausalLM", Scored, **_OPT)),
    TextModel(
        "gpt-neox",
        _made("GPTNeoXConfig", "GPTNeoXForCausalLM", Scored, **MINI, vocab_size=VOCABULARY, use_cache=False),
        held_out=True,
    ),
)
TEXT_MODELS = {model.name: model for model in (*ENCODERS, *RELATIVE, *DECODERS)}
