"""What people do with a model of transformers, done with an optimized one: pipelines, and questions about the model."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from word_tokenizer import WORDS, word_tokenizer

import refold
from refold.errors import FellBack

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TEXTS = ["the cat sat", "mary lives in paris . it is good .", "a dog"]
LETTERS = ("<pad>", "<s>", "</s>", "<unk>", "|", "A", "B", "C")
PLAIN: dict[str, Any] = {"backend": "plain", "effort": "quick", "progress": False}
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


def made(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=64, **SMALL | settings)
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


@pytest.mark.usefixtures("nothing_fell_back")
def test_an_image_pipeline_uses_it() -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install Pillow")
    config = transformers.ViTConfig(image_size=16, patch_size=8, **SMALL)
    model = transformers.ViTForImageClassification(config).eval()
    processor = transformers.ViTImageProcessorPil(size={"height": 16, "width": 16})
    images = [image.effect_noise((20, 18), sigma).convert("RGB") for sigma in (20, 50, 90)]
    expected = transformers.pipeline("image-classification", model=model, image_processor=processor)(images)
    example = dict(processor(images[:2], return_tensors="pt"))
    fast: Any = refold.optimize(model, example, pipeline=[refold.MergeLinears()], **PLAIN)
    pipe = transformers.pipeline("image-classification", model=fast, image_processor=processor)
    assert plain(pipe(images, batch_size=2)) == pytest.approx(plain(expected), abs=1e-5)
    assert (fast.report.calls.fast, fast.report.calls.original) == (2, 0)


@pytest.mark.usefixtures("nothing_fell_back")
def test_a_speech_pipeline_uses_it_for_padded_batches(tmp_path: Path) -> None:
    torch.manual_seed(0)
    convolutions = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    around = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer"}
    config = transformers.Wav2Vec2Config(vocab_size=8, pad_token_id=0, **convolutions, **around, **SMALL)
    model = transformers.Wav2Vec2ForCTC(config).eval()
    extractor = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    (tmp_path / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(LETTERS)}))
    parts = {
        "feature_extractor": extractor,
        "tokenizer": transformers.Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json")),
    }
    sounds = [torch.randn(length).numpy() for length in (800, 1200, 500)]
    task = "automatic-speech-recognition"
    expected = transformers.pipeline(task, model=model, **parts)(sounds, batch_size=2)
    example = dict(extractor(sounds[:2], padding=True, return_tensors="pt", sampling_rate=16000))
    fast: Any = refold.optimize(model, example, pipeline=[refold.MergeLinears()], **PLAIN)
    assert transformers.pipeline(task, model=fast, **parts)(sounds, batch_size=2) == expected
    assert (fast.report.calls.fast, fast.report.calls.original) == (2, 0)


@pytest.mark.usefixtures("nothing_fell_back")
def test_a_model_that_answers_questions_is_used(tokenizer: Any) -> None:
    """transformers 5 has no pipeline for it: the tokenizer puts question and text together."""
    model = made("BertForQuestionAnswering", num_labels=2)
    asked = [("is it good", "the cat sat . it is good ."), ("paris", "mary lives in paris")]
    batch = dict(tokenizer(*map(list, zip(*asked, strict=True)), padding=True, return_tensors="pt"))
    fast: Any = refold.optimize(model, batch, pipeline=[refold.MergeLinears()], **PLAIN)
    one = dict(tokenizer(*asked[1], return_tensors="pt"))
    with torch.no_grad():
        for call in (batch, one):
            found, expected = fast(**call), model(**call)
            assert torch.allclose(found.start_logits, expected.start_logits, atol=1e-5)
            assert torch.allclose(found.end_logits, expected.end_logits, atol=1e-5)
    assert (fast.report.calls.fast, fast.report.calls.original) == (2, 0)


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


@pytest.mark.usefixtures("nothing_fell_back")
def test_a_single_text_runs_fast_and_a_single_token_the_original() -> None:
    model = made("BertModel")
    ids = torch.randint(5, len(WORDS), (3, 9))
    fast = refold.optimize(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, effort="quick")
    with torch.no_grad():
        for part in (ids[:1], ids[:1, :5], ids[:2, :2], ids[:1, :1]):
            given = {"input_ids": part, "attention_mask": torch.ones_like(part)}
            torch.testing.assert_close(fast(**given).last_hidden_state, model(**given).last_hidden_state)
            assert sum(fast.fallbacks.values()) == (part.shape[1] == 1), "capture fixed lengths from two on"
