"""Training without padding: the same losses, weights and checkpoints; in eval mode the own code of the model runs."""

from __future__ import annotations

import copy
import inspect
import pickle
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from word_tokenizer import WORDS, texts_of_many_lengths, word_tokenizer

import refold
from refold.errors import FellBack, RefoldError
from refold.report.data import Calls

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_labels": 3}
TEXTS = texts_of_many_lengths(21)


def classifier(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        max_position_embeddings=64,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **SMALL,
    )
    return transformers.BertForSequenceClassification(config).train()


def batches(size: int = 7) -> list[dict[str, torch.Tensor]]:
    tokenizer = word_tokenizer()
    parts = [TEXTS[i : i + size] for i in range(0, len(TEXTS), size)]
    made = [dict(tokenizer(part, padding=True, return_tensors="pt")) for part in parts]
    return [{**batch, "labels": torch.arange(len(batch["input_ids"])) % 3} for batch in made]


def trained(model: Any) -> list[float]:
    """The losses of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, Any, list[float], list[float]]:
    """A model trained with padding and its twin trained without, and their losses."""
    padded, packed = classifier(), classifier()
    handle = refold.train_without_padding(packed)
    return padded, packed, handle, trained(padded), trained(packed)


def test_a_plain_loop_has_the_same_losses_and_the_same_weights(pair: Any) -> None:
    padded, packed, handle, expected, found = pair
    assert found == pytest.approx(expected, rel=1e-4) and handle.calls == Calls(fast=3)
    assert "token_plan" in handle.graph_module.code
    names = list(padded.state_dict())
    assert list(packed.state_dict()) == names
    for name in names:
        assert torch.allclose(packed.state_dict()[name], padded.state_dict()[name], atol=1e-3), name


def test_in_eval_mode_its_own_code_runs_on_the_same_parameters(pair: Any) -> None:
    packed, handle = pair[1:3]
    counted = handle.calls
    with torch.no_grad():
        found = packed.eval()(**batches()[0]).logits
        assert torch.equal(found, type(packed).forward(packed, **batches()[0]).logits)
    packed.train()
    assert handle.calls == counted


def test_copies_train_their_own_parameters_and_pickles_are_plain(pair: Any) -> None:
    packed = pair[1]
    batch = batches()[0]
    copied, loaded = copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    zero, expected = copied(**batch).loss, packed(**batch).loss
    assert zero.item() == pytest.approx(torch.tensor(3.0).log().item())  # three classes alike
    assert expected.item() != zero.item() and loaded(**batch).loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert loaded.forward.__func__ is type(packed).forward
    assert inspect.signature(packed.forward) == inspect.signature(loaded.forward)


def test_a_copy_of_a_forward_that_others_wrapped_runs_its_own_graph(pair: Any) -> None:
    """As accelerate wraps it for mixed precision: a method that is made from the function of the one before."""
    packed, batch = pair[1], batches()[0]
    before = packed.forward
    packed.forward = types.MethodType(torch.autocast("cpu", dtype=torch.bfloat16)(before.__func__), packed)
    try:
        copied = copy.deepcopy(packed)
    finally:
        packed.forward = before
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert copied(**batch).loss.item() == pytest.approx(torch.tensor(3.0).log().item(), rel=1e-2)
    assert copied._refold_training.calls.fast == 1


def test_another_call_runs_the_models_own_code_and_says_so(pair: Any) -> None:
    packed, handle = pair[1:3]
    before = handle.calls.original
    with pytest.warns(FellBack, match=r"output_hidden_states.*first call in training mode"):
        found = packed(**batches()[0], output_hidden_states=True)
    assert found.hidden_states is not None and handle.calls.original == before + 1


def test_restoring_gives_the_model_its_own_forward_again() -> None:
    model = classifier()
    handle = refold.train_without_padding(model)
    with pytest.raises(RefoldError, match="already"):
        refold.train_without_padding(model)
    assert handle.restore() is model and "forward" not in vars(model)


def test_dropout_and_missing_masks_are_refused_with_a_sentence() -> None:
    model = classifier(dropout=0.1)
    refold.train_without_padding(model)
    with pytest.raises(RefoldError, match=r"drops values at random: set the model's dropout to 0.*\.restore\(\)"):
        model(**batches()[0])
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4)).train()
    refold.train_without_padding(plain)
    with pytest.raises(RefoldError, match="no input of this call is a mask"):
        plain(torch.randn(2, 4))
    with pytest.raises(RefoldError, match="padding must be"):
        refold.train_without_padding(plain, padding="some")


def test_the_trainer_saves_checkpoints_of_the_original_layout(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    tokenizer = word_tokenizer()
    data = [{**tokenizer(text), "labels": i % 3} for i, text in enumerate(TEXTS)]
    losses, models = [], [classifier(), classifier()]
    handle = refold.train_without_padding(models[1])
    for i, model in enumerate(models):
        settings = transformers.TrainingArguments(
            str(tmp_path / str(i)),
            num_train_epochs=1,
            per_device_train_batch_size=7,
            learning_rate=1e-2,
            logging_steps=1,
            save_steps=3,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model=model, args=settings, train_dataset=data, eval_dataset=data[:4], processing_class=tokenizer
        )
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        losses[-1].append(trainer.evaluate()["eval_loss"])
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert handle.calls == Calls(fast=3)
    saved = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "1" / "checkpoint-3").state_dict()
    assert list(saved) == list(models[1].state_dict())
    assert all(torch.equal(saved[name], tensor) for name, tensor in models[1].state_dict().items())
