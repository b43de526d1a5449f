"""A tokenizer of a few words, since nothing is downloaded, and texts of very different lengths for it."""

from __future__ import annotations

import random
from typing import Any

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (*SPECIAL, "the", "a", "cat", "dog", "sat", "is", "it", "good", ".", "paris", "in", "lives", "mary")


def word_tokenizer(longest: int = 64) -> Any:
    """A tokenizer of transformers for single texts and for pairs."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    found = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {f"{name[1:-1].lower()}_token": name for name in SPECIAL}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found, model_max_length=longest, **names)


def texts_of_many_lengths(count: int, seed: int = 0) -> list[str]:
    """Texts of 2 to 30 words, in no order."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS[len(SPECIAL) :], k=draw.randint(2, 30))) for _ in range(count)]
