"""padding="zeros": zeros at padding on every way, all else as the model gives it; or a note that says why not."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from refold import RemovePadding
from refold.errors import RefoldError
from refold.optimization.job_stages import optimize
from refold.optimization.zeroed_outputs import ZeroedOutputs
from refold.verification.accuracy import OutputReference

tf = pytest.importorskip("transformers")
SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def call(kind: str, rows: int = 4, length: int = 9) -> dict[str, Any]:
    lengths = torch.tensor([length, 2, max(1, length // 3), 1])[:rows, None]
    right = (torch.arange(length) < lengths).long()
    mask = {"right": right, "left": right.flip(1), "full": torch.ones_like(right)}[kind]
    return {"input_ids": torch.randint(0, 50, (rows, length)), "attention_mask": mask}


def bert() -> nn.Module:
    torch.manual_seed(0)
    return tf.BertModel(tf.BertConfig(**SIZES)).eval()


def check(fast: Any, reference: nn.Module, kwargs: dict[str, Any]) -> None:
    """Zeros at padding; elsewhere, and in all other outputs, the model within what rounding does to it."""
    with torch.no_grad():
        found = fast(**kwargs)
    graded = OutputReference.of(Zeroed(reference), kwargs).grade(found)
    assert graded.acceptable, "; ".join(map(str, graded.outputs))
    assert not found.last_hidden_state[kwargs["attention_mask"] == 0].any()
    assert type(found) is type(reference(**kwargs)) and found.pooler_output is not None


class Zeroed(nn.Module):
    """A model with zeros at padding, written by hand."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        found = self.model(input_ids=input_ids, attention_mask=attention_mask)
        found.last_hidden_state = found.last_hidden_state * (attention_mask == 1)[..., None]
        return found


@pytest.mark.parametrize("executor", ["plain", "auto"])
def test_zeros_at_padding_on_every_way(executor: str) -> None:
    model = bert()
    reference = copy.deepcopy(model)
    fast = optimize(model, call("right"), padding="zeros", backend=executor, effort="quick", progress=False)
    assert {"RemovePadding": "kept"}.items() <= {s.name: s.status for s in fast.report.steps}.items()
    assert any("last_hidden_state (where attention_mask is 0)" in note for note in fast.report.notes)
    for kind in ("right", "left", "full"):
        check(fast, reference, call(kind))
        check(fast, reference, call(kind, rows=3, length=14))
    assert not fast.fallbacks, "all of them ran fast"
    given = call("left")
    with torch.no_grad():
        by_position = fast(given["input_ids"], given["attention_mask"])
    assert not by_position.last_hidden_state[given["attention_mask"] == 0].any()


def test_the_original_gives_zeros_too_where_it_runs() -> None:
    model, silent = bert(), {"on_fallback": "ignore", "progress": False}
    fast = optimize(model, call("right"), padding="zeros", backend="plain", effort="quick", **silent)
    kwargs = call("left")
    with torch.no_grad():
        more = fast(**kwargs, output_hidden_states=True)
        expected = model(**kwargs, output_hidden_states=True)
    assert not more.last_hidden_state[kwargs["attention_mask"] == 0].any()
    assert all(map(torch.equal, more.hidden_states[:-1], expected.hidden_states[:-1])), "others are the original's"
    without = fast(input_ids=kwargs["input_ids"])
    assert torch.equal(without.last_hidden_state, model(input_ids=kwargs["input_ids"]).last_hidden_state)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    fast.train()
    trained = fast(**kwargs).last_hidden_state
    assert trained.requires_grad and not trained[kwargs["attention_mask"] == 0].any()
    fast.eval()
    with torch.no_grad():
        next(fast.parameters()).mul_(1.5)
    check(fast, copy.deepcopy(model), kwargs)
    fast.restore()
    check(fast, copy.deepcopy(model), kwargs)
    assert len(fast.fallbacks) >= 4, "each of these calls ran the original"


def test_nothing_is_zero_that_is_no_token() -> None:
    """A head over the first token gives nothing at padding: the note says so, and nothing changes."""
    torch.manual_seed(0)
    model = tf.BertForSequenceClassification(tf.BertConfig(**SIZES)).eval()
    reference = copy.deepcopy(model)
    fast = optimize(model, call("right"), padding="zeros", backend="plain", effort="quick", progress=False)
    assert any("makes no difference" in note for note in fast.report.notes)
    kwargs = call("left")
    with torch.no_grad():
        assert OutputReference.of(reference, kwargs).grade(fast(**kwargs)).acceptable


def test_without_it_the_report_says_what_to_add() -> None:
    fast = optimize(bert(), call("right"), pipeline=RemovePadding(), effort="quick", progress=False)
    assert any("padding='zeros'" in note for note in fast.report.notes)
    kwargs = call("right")
    with torch.no_grad():
        assert fast(**kwargs).last_hidden_state[kwargs["attention_mask"] == 0].any(), "the model's own numbers"


def test_zeros_reach_into_nested_results() -> None:
    def forward(x: torch.Tensor, mask: torch.Tensor | None = None) -> None: ...

    outputs = ZeroedOutputs(inspect.signature(forward), (("hidden_states[1]", "mask"), ("logits", "mask")))
    x, mask = torch.ones(2, 3, 4), torch.tensor([[1, 0, 0], [1, 1, 0]])
    given = tf.modeling_outputs.CausalLMOutput(logits=x[:, 0], hidden_states=(x, x.clone()))
    found = outputs.of(given, (x, mask), {})
    assert type(found) is type(given) and found.hidden_states[0] is x and torch.equal(found.logits, x[:, 0])
    assert torch.equal(found.hidden_states[1], x * mask[..., None]) and given.hidden_states[1].all()
    one_row = outputs.of(given, (x,), {"mask": mask[:1]}).hidden_states[1]
    assert torch.equal(one_row, x * mask[:1, :, None]), "a mask of one row is that of all rows"
    assert outputs.of(given, (x,), {}) is given, "no mask, no padding"


def test_other_words_are_refused() -> None:
    with pytest.raises(RefoldError, match=r"padding must be None, or 'zeros'.*not 'exact'"):
        optimize(bert(), call("right"), padding="exact", progress=False)
