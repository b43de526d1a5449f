"""Embeddings and rerankers of sentence-transformers with the optimized model inside: equal scores, every batch fast."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from word_tokenizer import WORDS, texts_of_many_lengths, word_tokenizer

import refold
from refold.errors import FellBack

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

TEXTS = texts_of_many_lengths(23)
PAIRS = list(zip(TEXTS, texts_of_many_lengths(23, seed=1), strict=True))
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture(scope="module", params=("embeddings", "scores"))
def used(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model of sentence-transformers, its inputs, and the function that it is used by."""
    folder = tmp_path_factory.mktemp(request.param)
    kind = "BertModel" if request.param == "embeddings" else "BertForSequenceClassification"
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=64, num_labels=1, **SMALL)
    getattr(transformers, kind)(config).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return _made(request.param, folder)


def _made(what: str, folder: Path) -> tuple[Any, list[Any], Any]:
    if what == "embeddings":
        encoder = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
        return encoder, TEXTS, encoder.encode
    reranker = sentence_transformers.CrossEncoder(str(folder), device="cpu", max_length=64)
    return reranker, PAIRS, reranker.predict


@pytest.fixture(autouse=True)
def nothing_fell_back() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FellBack)
        yield


def test_the_inner_model_is_replaced_and_every_batch_runs_fast(used: Any) -> None:
    model, inputs, use = used
    arrived, in_batches = use(inputs, batch_size=len(inputs)), use(inputs, batch_size=5)
    features = model.preprocess(inputs[:6])
    example = {name: value for name, value in features.items() if isinstance(value, torch.Tensor)}
    padding = "zeros" if inputs is TEXTS else None  # all positions are pooled outside, or one is read inside
    rules = [refold.RemovePadding(padding=padding or "exact")]
    fast = refold.optimize(
        model[0].model,
        {**example, "return_dict": True},
        pipeline=rules,
        padding=padding,
        effort="quick",
        backend="plain",
    )
    assert [step.status for step in fast.report.steps] == ["kept"]
    model[0].model = fast
    assert np.allclose(use(inputs, batch_size=len(inputs)), arrived, atol=1e-5)  # one batch, as they arrived
    assert np.allclose(use(inputs, batch_size=5), in_batches, atol=1e-5)  # sorted by length
    assert np.allclose(use(inputs[:3]), arrived[:3], atol=1e-5)
    assert (fast.report.calls.fast, fast.report.calls.original) == (1 + 5 + 1, 0)
