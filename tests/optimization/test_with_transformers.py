"""What people do with a model of transformers, done with an optimized one: pipelines, and questions about the model."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from word_tokenizer import WORDS, word_tokenizer

import refold
from refold.errors import FellBack

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TEXTS = ["the cat sat", "mary lives in paris . it is good .", "a dog"]
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_labels": 3}

TASKS: dict[str, tuple[str, list[str]]] = {
    "text-classification": ("BertForSequenceClassification", TEXTS),
    "token-classification": ("BertForTokenClassification", TEXTS),
    "feature-extraction": ("BertModel", TEXTS),
    "fill-mask": ("BertForMaskedLM", ["the [MASK] sat", "mary [MASK] in paris ."]),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


@pytest.fixture
def nothing_fell_back() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FellBack)
        yield


def made(name: str) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=64, **SMALL)
    return getattr(transformers, name)(config).eval()


@pytest.mark.usefixtures("nothing_fell_back")
@pytest.mark.parametrize("task", TASKS)
def test_a_pipeline_uses_it_for_every_batch(task: str, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    name, texts = TASKS[task]
    model = made(name)
    example = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    expected = transformers.pipeline(task, model=model, tokenizer=tokenizer)(texts, batch_size=2)
    fast = refold.optimize(model, example, pipeline=[refold.MergeLinears()], backend="plain")
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        pipe = transformers.pipeline(task, model=fast, tokenizer=tokenizer)
        found = pipe(texts, batch_size=2)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert "is not supported" not in caplog.text
    assert pipe.model is fast and fast.report.calls is not None
    assert (fast.report.calls.fast, fast.report.calls.original) == ((len(texts) + 1) // 2, 0)
    assert plain(found) == pytest.approx(plain(expected), abs=1e-5)


def test_an_image_pipeline_uses_it() -> None:
    config = transformers.ViTConfig(image_size=16, patch_size=8, **SMALL)
    model = transformers.ViTForImageClassification(config).eval()
    images = torch.rand(3, 3, 16, 16)
    fast = refold.optimize(
        model, {"pixel_values": images}, pipeline=[refold.MergeLinears()], backend="plain", on_fallback="raise"
    )
    with torch.no_grad():
        found, expected = (m(pixel_values=images[:2]).logits for m in (fast, model))
    assert torch.allclose(found, expected, atol=1e-5) and fast.report.calls.fast == 1


def plain(value: Any) -> list[Any]:
    """The numbers in a result, words as their hashes, in order."""
    if isinstance(value, dict):
        return plain(list(value.values()))
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in plain(item)]
    return [float(hash(value) % 1000) if isinstance(value, str) else float(value or 0)]


def test_it_answers_as_the_model_does(tokenizer: Any) -> None:
    model = made("BertForSequenceClassification")
    fast = refold.optimize(
        model, dict(tokenizer(TEXTS, padding=True, return_tensors="pt")), pipeline=[], backend="plain"
    )
    assert isinstance(fast, transformers.BertForSequenceClassification) and isinstance(fast, torch.nn.Module)
    assert isinstance(fast, refold.optimization.optimized_module.OptimizedModule)
    assert fast.__class__ is type(model) and type(fast) is not type(model)
    assert fast.config is model.config and fast.base_model is model.base_model
    assert (fast.device, fast.dtype, fast.can_generate()) == (model.device, model.dtype, model.can_generate())
    assert fast.num_parameters() == model.num_parameters() and fast.main_input_name == "input_ids"
