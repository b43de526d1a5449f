"""What dimensions follow is held against real runs: one element of an input is changed, and what changes in the output
must lie where the analysis says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn
from torch.fx import Interpreter, Node

import refold
from refold.graph.constants import run_node
from refold.graph.view import GraphView
from refold.patterns.dimensions.following import MIXES, Followed, followed_dims

B, S, D = 3, 7, 8


class _Recording(Interpreter):
    def __init__(self, gm: torch.fx.GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


def _changed(given: torch.Tensor, at: tuple[int, ...]) -> torch.Tensor:
    """A copy with another value at one place; whole numbers stay within those that are there."""
    other = given.clone()
    if given.dtype == torch.bool:
        other[at] = ~other[at]
    elif given.is_floating_point():
        other[at] = other[at] * -1.7 + 0.9
    else:
        others = given[given != given[at]]
        other[at] = others.flatten()[0] if others.numel() else other[at]
    return other


def _many(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple | list) else [value]


def _check_node(gm: Any, node: Node, values: dict[Node, Any], claim: Followed) -> int:
    """Change elements of each input of a node, run it again, and hold what changes to the claim; how many changed."""
    before, changes = _many(run_node(gm, node, values)), 0
    generator = torch.Generator().manual_seed(0)
    for given, dims in claim.items():
        tensor = values[given]
        if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
            continue
        for _ in range(4):
            at = tuple(int(torch.randint(size, (), generator=generator)) for size in tensor.shape)
            after = _many(run_node(gm, node, values | {given: _changed(tensor, at)}))
            for old, new in zip(before, after, strict=True):
                assert len(dims) == old.dim(), f"{node.format_node()}: {dims}"
                differs = (old != new) & ~(old.isnan() & new.isnan())
                changes += int(differs.any())
                for d, k in enumerate(dims):
                    if isinstance(k, int):
                        assert old.shape[d] == tensor.shape[k], f"{node.format_node()}: {dims} of {given}"
                        places = differs.movedim(d, 0).reshape(differs.shape[d], -1).any(1).nonzero().flatten().tolist()
                        assert set(places) <= {at[k]}, f"{node.format_node()}: {dims} of {given}, {places} for {at}"
    return changes


def check(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, list[Followed]]:
    """Hold all nodes of a captured model to what real runs show; what was claimed, by the name of what is called."""
    gm = refold.trace(model.eval(), *args, **kwargs)
    view, claims = GraphView(gm), {}
    run = _Recording(gm)
    bound = [n for n in gm.graph.nodes if n.op == "placeholder"]
    given = dict(zip([n.target for n in bound], args, strict=False)) | kwargs
    with torch.no_grad():
        run.run(*[given.get(n.target, n.args[0] if n.args else None) for n in bound])
        for node in gm.graph.nodes:
            claim = followed_dims(view, node)
            if claim is None:
                continue
            name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
            claims.setdefault(name, []).append(claim)
            if node.op in ("call_module", "call_function", "call_method"):
                _check_node(gm, node, run.values, claim)
    return claims


class Calls(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor, y: torch.Tensor, i: torch.Tensor) -> Any:
        return self.call(x, y, i)


TABLE = torch.randn(11, D)
CALLS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y, i: x + y[:1] * 2 - y[:, :1],
    "where": lambda x, y, i: torch.where(i.unsqueeze(-1) > 4, x, y.masked_fill(y > 0, 0.5)),
    "mean": lambda x, y, i: (
        x.mean(1),
        x.mean(-1, keepdim=True).sum(1),
        y.amin(1),
        x.amax((0, 2), keepdim=True),
        y.mean(),
    ),
    "max": lambda x, y, i: (x.max(1).values, torch.maximum(x, y), x.argmax(-1), y.norm(dim=1)),
    "softmax": lambda x, y, i: (x.softmax(-1), y.softmax(1), F.log_softmax(x, 0)),
    "cumsum": lambda x, y, i: (x.cumsum(1), y.flip(1), x.roll(1, 1)),
    "topk": lambda x, y, i: (x.topk(2, -1).values, x.sort(1).values, y.argsort(-1)),
    "permute": lambda x, y, i: (x.permute(2, 0, 1), y.transpose(0, 1).unsqueeze(1).squeeze(1), x.mT),
    "view": lambda x, y, i: x.view(x.shape[0], x.shape[1], 4, 2).transpose(1, 2).reshape(x.shape[0], 4, -1),
    "merge": lambda x, y, i: ((x.reshape(-1, 8) @ TABLE[:8]).view(x.shape), y.flatten(1).unflatten(1, (-1, 8))),
    "expand": lambda x, y, i: (
        x[:, :1].expand(-1, y.shape[1], -1),
        x[:1].repeat(y.shape[0], 1, 1),
        x.repeat_interleave(2, 1),
    ),
    "slice": lambda x, y, i: (x[:, 1:] + y[:, :-1], x[:, 0:1], x[..., ::2], x[None, ..., 2]),
    "select": lambda x, y, i: x[:, 0] + x.select(1, 2) + y[:, -1],
    "pad": lambda x, y, i: F.pad(x[:, 1:], (0, 0, 0, 1)) + y,
    "split": lambda x, y, i: (*x.split(4, -1), torch.stack(y.unbind(-1), -1), torch.cat(x.chunk(2, 2), 2)),
    "embedding": lambda x, y, i: F.embedding(i, TABLE) + x,
    "index": lambda x, y, i: (TABLE[i], TABLE[:, i[0] % 8], x[:, i % 7]),
    "index rows": lambda x, y, i: (x[torch.arange(x.shape[0]), i.argmax(-1)], x[:, [0, 2]]),
    "index pairs": lambda x, y, i: x[torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])[None]] + y,
    "index apart": lambda x, y, i: x[torch.arange(x.shape[0]), :, i[:, 0] % 8],
    "index select": lambda x, y, i: (x.index_select(1, i[0] % 7), x.gather(2, i.unsqueeze(-1).expand_as(x) % 8)),
    "matmul": lambda x, y, i: ((x @ y.mT).softmax(-1) @ y, x @ TABLE[:8], torch.bmm(x, y.mT), x @ x.mT, y @ TABLE[0]),
    "addmm": lambda x, y, i: torch.addmm(TABLE[0], x.reshape(-1, 8), TABLE[:8]),
    "einsum": lambda x, y, i: (torch.einsum("bsd,btd->bst", x, y), torch.einsum("bsd,de->be", x, TABLE[:8])),
    "attention": lambda x, y, i: F.scaled_dot_product_attention(
        x[:, None], y[:, None], torch.tanh(x)[:, None], (i > 4)[:, None, None]
    ),
    "itself": lambda x, y, i: _attend_to_itself(x[:, None]),
    "norms": lambda x, y, i: (F.layer_norm(x, (8,), TABLE[0]), F.rms_norm(y, (8,)), F.group_norm(x.mT, 2)),
    "conv": lambda x, y, i: (
        F.conv1d(x.mT, TABLE[:, :, None]),
        F.conv1d(y.mT, TABLE[:, :, None].repeat(1, 1, 3), padding=1),
    ),
    "pool": lambda x, y, i: (F.avg_pool1d(x, 2, 2), F.max_pool1d(y.mT, 3, 1, 1), F.adaptive_avg_pool1d(x, 4)),
    "in place": lambda x, y, i: x.clone().add_(y).relu_(),
    "like": lambda x, y, i: (
        torch.zeros_like(x) + torch.ones_like(y) + x.new_ones(8) + torch.arange(x.shape[1])[:, None]
    ),
}


def _attend_to_itself(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize("name", CALLS)
def test_what_changes_is_where_the_analysis_says(name: str) -> None:
    torch.manual_seed(0)
    x, y, i = torch.randn(B, S, D), torch.randn(B, S, D), torch.randint(0, 11, (B, S))
    assert check(Calls(CALLS[name]), x, y, i)


def _tiny(name: str) -> nn.Module:
    torch.manual_seed(0)
    c = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
    if name == "bert":
        return tf.BertForSequenceClassification(tf.BertConfig(**c))
    if name == "gpt2":
        return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64, use_cache=False))
    return tf.T5EncoderModel(tf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=64))


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_whole_models_are_understood(name: str) -> None:
    """Every node of floating-point numbers in which rows and positions are kept follows both."""
    model = _tiny(name)
    mask = torch.ones(B, S, dtype=torch.long)
    mask[0, 4:] = 0
    inputs = {"input_ids": torch.randint(3, 64, (B, S)), "attention_mask": mask}
    check(copy.deepcopy(model), **inputs)
    view = GraphView(refold.trace(model.eval(), **inputs))
    tensors = [n for n in view.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    in_place = [n for n in tensors if not view.written.keys().isdisjoint((n, *n.all_input_nodes))]
    unknown = [n for n in tensors if followed_dims(view, n) is None and n not in in_place]
    assert unknown == [], [n.format_node() for n in unknown]
    layers = [
        n for n in tensors if n.op == "call_module" and "dropout" not in n.name.lower() and n.meta["val"].dim() == 3
    ]
    layers = [n for n in layers if n not in in_place]
    assert len(layers) >= 5
    assert all(next(iter(followed_dims(view, n).values()))[:2] == (0, 1) for n in layers)


def _claims(call: Callable[..., Any]) -> dict[str, Followed]:
    x = torch.randn(B, S, D)
    gm = refold.trace(Calls(call).eval(), x, x.clone(), torch.randint(0, 7, (B, S)))
    view = GraphView(gm)
    return {n.name: {i.name: d for i, d in f.items()} for n in view.nodes if (f := followed_dims(view, n))}


def test_what_is_said_of_attention_products_and_cuts() -> None:
    attention = _claims(CALLS["attention"])["scaled_dot_product_attention"]
    assert list(attention.values()) == [(0, 1, 2, None), (0, 1, None, None), (0, 1, None, 3), (0, 1, None, None)]
    said = _claims(lambda x, y, i: (x @ y.transpose(1, 2), x[:, 1:], x[:, 0], x.flatten(0, 1), x.sum(1), x[:, :1] + y))
    assert said["matmul"] == {"x": (0, 1, None), "transpose": (0, None, 2)}
    assert list(said["select"].values()) == [(0, 2)]
    assert said["flatten"]["x"] == (MIXES, 2)
    assert said["sum_1"]["x"] == (0, 2)
    cuts = [dims for name, said_of in said.items() if name.startswith("slice") for dims in said_of.values()]
    assert (0, MIXES, 2) in cuts
    (broadcast,) = [dims for name, dims in said.items() if name.startswith("add")]
    assert sorted(map(str, broadcast.values())) == ["(0, 1, 2)", "(0, None, 2)"]


def test_sizes_that_are_equal_by_chance_are_not_taken_for_equal() -> None:
    """In the example 4 features stand in 7 positions of 8; in a call they need not."""
    said = _claims(lambda x, y, i: x.transpose(0, 1).reshape(x.shape[0], x.shape[1], -1))
    assert said["reshape"]["transpose"] == (MIXES, MIXES, 2)


def test_unknown_code_and_written_memory_are_not_understood() -> None:
    said = _claims(lambda x, y, i: torch.fft.fft(x, dim=1).real + x.clone().add_(y).mul(2))
    assert not any("fft" in name for name in said)
    assert not any(name.startswith(("mul", "clone")) for name in said)


def test_a_wrong_claim_is_caught() -> None:
    """The check of this file fails where something false is said."""
    x = torch.randn(B, S, D)
    gm = refold.trace(Calls(lambda x, y, i: x.roll(1, 1)).eval(), x, x, torch.zeros(B, S, dtype=torch.long))
    node = next(n for n in gm.graph.nodes if "roll" in n.name)
    given = node.all_input_nodes[0]
    assert followed_dims(GraphView(gm), node) == {given: (0, MIXES, 2)}
    with pytest.raises(AssertionError):
        _check_node(gm, node, {given: x}, {given: (0, 1, 2)})
