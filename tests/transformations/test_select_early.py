"""SelectEarly: what is read at few places only is computed there only, exactly, at every size; the rest stays."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import refold
from refold import SelectEarly, trace, verify
from refold.graph.values import example_value

torch.manual_seed(0)
X = torch.randn(2, 9, 8, dtype=torch.float64)
LONGER = torch.randn(3, 14, 8, dtype=torch.float64)


class Layer(nn.Module):
    """A layer of a transformer, its attention causal or not, and what a function reads of it."""

    def __init__(self, read, causal=False):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.read, self.causal = read, causal
        self.register_buffer("places", torch.tensor([3, -1, 0, 3]))

    def forward(self, x):
        x = torch.tanh(x)
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)
        x = self.norm(x + self.out(mixed))
        return self.read(self, x + self.down(F.gelu(self.up(x))))


READS = {
    "the first": lambda m, x: x[:, 0].sin(),
    "the second": lambda m, x: x[:, 1],
    "the last but one": lambda m, x: x[:, -2],
    "the last as a slice": lambda m, x: x[:, -1:],
    "out of order and repeated": lambda m, x: x[:, m.places],
    "by index_select": lambda m, x: x.index_select(1, torch.tensor([4, 0])),
    "some features of the last": lambda m, x: x[:, -1, ::2],
    "two that are the same": lambda m, x: x[:, 0].sin() + x[:, :1].cos().squeeze(1),
    "behind a reduction over features": lambda m, x: (x / x.square().mean(-1, keepdim=True).sqrt())[:, 0],
}


def widest(gm, calls=("linear", "layer_norm", "gelu")):
    """How many places each of the projections computes at the example's length."""
    found = {}
    for node in gm.graph.nodes:
        value = example_value(node)
        if node.op == "call_module" and value is not None and value.dim() > 2:
            found[str(node.target)] = value.shape[1]
    return found


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("causal", [False, True])
def test_the_layer_is_computed_where_it_is_read(name, causal):
    model = Layer(READS[name], causal).double().eval()
    gm = trace(model, X)
    code = gm.code
    SelectEarly()(gm)
    sizes = widest(gm)
    assert all(not isinstance(sizes[layer], int) for layer in ("key", "value")), "keys and values stay whole"
    assert all(isinstance(sizes.get(layer, 1), int) for layer in ("norm", "up", "down", "out")), sizes
    for given in (X, LONGER):
        torch.testing.assert_close(gm(given), model(given), rtol=1e-12, atol=1e-12)
    assert verify(gm, X).right
    refold.undo(gm)
    assert gm.code == code and torch.equal(gm(X), model(X))


def test_the_queries_are_chosen_too_and_the_last_one_needs_no_mask():
    for read, masked in ((READS["the last as a slice"], False), (READS["the second"], True)):
        gm = trace(Layer(read, causal=True).double().eval(), X)
        SelectEarly()(gm)
        (attention,) = (n for n in gm.graph.nodes if "scaled_dot" in n.name)
        assert example_value(attention).shape[2] == 1 and ("attn_mask" in attention.kwargs) is masked
        assert "is_causal" not in attention.kwargs and len(attention.args) == 3
        assert widest(gm)["query"] == 1


class Rows(nn.Module):
    """Attention in single steps with a table for positions, read at the last place."""

    def __init__(self):
        super().__init__()
        self.mix, self.table = nn.Linear(8, 8), nn.Parameter(torch.randn(1, 16, 8))

    def forward(self, x):
        x = self.mix(x.tanh() + self.table[:, : x.shape[1]])
        scores = x @ x.cos().transpose(1, 2) / 3 + torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
        return (scores.softmax(-1) @ x.sin())[:, -1]


def test_attention_in_single_steps():
    model = Rows().double()
    gm = trace(model, X)
    SelectEarly()(gm)
    softmax = next(n for n in gm.graph.nodes if "softmax" in n.name)
    assert example_value(softmax).shape[1] == 1
    for given in (X, LONGER):
        torch.testing.assert_close(gm(given), model(given), rtol=1e-12, atol=1e-12)


OTHERS = {
    "all is read": (lambda m, x: x[:, 0] + x.mean(1), "all of it is read by mean"),
    "two places": (lambda m, x: x[:, 0] + x[:, 1], "choose differently"),
    "places are mixed": (lambda m, x: x.cumsum(1)[:, 0], "more than one of"),
    "places are mixed by a norm": (lambda m, x: x.softmax(1)[:, 0], "more than one of"),
    "places are moved": (lambda m, x: x.roll(1, 1)[:, 0], "more than one of"),
    "the index is made of it": (lambda m, x: x[:, x.argmax(1)[0, :2].clamp(max=3)], "choose differently"),
    "rows of batch and length": (lambda m, x: x.reshape(-1, 8)[:1], "more than one of"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_cannot_be_chosen_earlier_says_why(name):
    read, reason = OTHERS[name]
    model = Layer(read).double().eval()
    gm = trace(model, X)
    SelectEarly()(gm)
    assert reason in str(refold.result(gm)) and not isinstance(widest(gm)["norm"], int)
    torch.testing.assert_close(gm(LONGER), model(LONGER), rtol=1e-12, atol=1e-12)


def test_most_of_it_or_what_is_written_into_is_left_alone():
    def written(m, x):
        x = x * 2
        first = x[:, 0]
        x.add_(1)
        return first + x[:, 0]

    for read in (lambda m, x: x[:, 1:], lambda m, x: x[:, :8], written):
        gm = trace(Layer(read).double().eval(), X, dynamic=False)
        SelectEarly()(gm)
        assert widest(gm)["norm"] == 9


def test_dropout_in_training_draws_the_same_numbers():
    gm = trace(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), Head()).double().train(), X)
    SelectEarly()(gm)
    assert not refold.history(gm) and "more than compute" in str(refold.result(gm))


class Head(nn.Module):
    def forward(self, x):
        return x.select(1, 0)


def families():
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    text = small | {"vocab_size": 30, "max_position_embeddings": 32}
    ids = torch.randint(1, 30, (2, 7))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    yield (
        transformers.BertForSequenceClassification(transformers.BertConfig(**text)),
        {"input_ids": ids, "attention_mask": mask},
        ("1.intermediate.dense", "1.output.dense", "1.attention.self.query"),
    )
    config = transformers.ViTConfig(**small, image_size=8, patch_size=2)
    images = {"pixel_values": torch.randn(2, 3, 8, 8)}
    yield transformers.ViTForImageClassification(config), images, ("1.mlp.fc1", "1.attention.q_proj")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**text, num_key_value_heads=1))
    last = {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}
    yield model, last, ("1.mlp.down_proj", "1.self_attn.q_proj", "lm_head")


@pytest.mark.parametrize("place", range(3), ids=["bert", "vit", "llama"])
def test_families_compute_their_last_layer_at_one_place(place):
    torch.manual_seed(0)
    model, inputs, layers = list(families())[place]
    model = model.eval().double()
    inputs = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
    gm = trace(model, **inputs)
    original = copy.deepcopy(gm)
    SelectEarly()(gm)
    sizes = widest(gm)
    for layer in layers:
        assert [size for name, size in sizes.items() if name.endswith(layer)] == [1], (layer, sizes)
    more = {k: torch.cat([v, v.flip(0)]) if torch.is_tensor(v) else v for k, v in inputs.items()}
    for given in (inputs, more):
        torch.testing.assert_close(gm(**given)["logits"], original(**given)["logits"], rtol=1e-12, atol=1e-12)
