"""Some outputs alone: the others come back as None on every way, and what only they needed is gone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from refold.errors import BadExample
from refold.optimization.job_stages import optimize

X = torch.randn(3, 8)


class Heads(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.small, self.large, self.kind = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 64), kind

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.relu(self.body(x))
        small, large = self.small(hidden), self.large(hidden)
        return {"small": small, "large": large} if self.kind == "dict" else (small, large)


@pytest.mark.parametrize(("kind", "key"), [("dict", "small"), ("tuple", 0)])
def test_the_others_are_none_and_not_computed(kind: str, key: Any) -> None:
    model = Heads(kind).eval()
    reference = copy.deepcopy(model)
    fast = optimize(model, (X,), outputs=[key], backend="plain", effort="quick", progress=False)
    other = "large" if kind == "dict" else 1
    assert not any(node.target == "large" for node in fast.graph_module.graph.nodes)
    with torch.no_grad():
        for x in (X, torch.randn(5, 8), torch.randn(1, 8)):
            torch.testing.assert_close(fast(x)[key], reference(x)[key])
            assert fast(x)[other] is None and type(fast(x)) is type(reference(x))
    assert not fast.notes
    x = X.clone().requires_grad_()
    assert fast(x)[other] is None and fast(x)[key].requires_grad and fast.notes, "so does the original"


def test_outputs_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)).eval()
    ids = torch.randint(0, 50, (2, 6))
    fast = optimize(model, {"input_ids": ids}, outputs=["pooler_output"], effort="quick", progress=False)
    with torch.no_grad():
        found, expected = fast(input_ids=ids), copy.deepcopy(fast.original)(input_ids=ids)
    assert type(found) is type(expected) and list(found) == ["pooler_output"] and found.last_hidden_state is None
    torch.testing.assert_close(found.pooler_output, expected.pooler_output)


def test_names_that_the_model_does_not_give_are_refused() -> None:
    with pytest.raises(BadExample, match="no output 'logits'; it gives small, large"):
        optimize(Heads("dict").eval(), (X,), outputs=["logits"], progress=False)
    with pytest.raises(BadExample, match="the model gives one"):
        optimize(nn.Linear(8, 8).eval(), (X,), outputs=[0], progress=False)
