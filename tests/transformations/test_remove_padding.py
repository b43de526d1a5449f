"""RemovePadding: the same numbers as the padded batch for every kind of mask, or a refusal with its reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn
from torch.fx import GraphModule

import refold
from refold import RemovePadding
from refold.patterns.packing import token_operators

WORDS, WIDTH, ROWS = 32, 8, 4
F64 = torch.float64


def padded(kind: str, length: int, rows: int = ROWS) -> torch.Tensor:
    """A mask with some kind of padding: right, left, mixed, none at all, or a row without a token."""
    lengths = torch.tensor([length, max(1, length // 3), 2, max(1, 2 * length // 3)])[:rows, None]
    right = (torch.arange(length) < lengths).long()
    if kind == "empty":
        right[1] = 0
    if kind == "mixed":
        return right.gather(1, torch.rand(rows, length, generator=torch.Generator().manual_seed(1)).argsort(1))
    return {"right": right, "empty": right, "left": right.flip(1), "full": torch.ones_like(right)}[kind]


KINDS = ("right", "left", "mixed", "full", "empty")


class Model(nn.Module):
    """Token-wise layers around a middle that may look at other tokens, and a head that chooses what is given out."""

    def __init__(self, middle: Callable[..., Any] | None = None, head: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.words, self.first, self.second = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.drop = nn.Dropout(0.0)
        self.middle, self.head = middle, head or masked_mean

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(self.words(ids)))
        x = x if self.middle is None else self.middle(self, x, mask)
        return self.head(self.drop(self.second(x)), mask, ids)


def masked_mean(x: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def attend(x: torch.Tensor, mask: torch.Tensor | None, causal: bool = False) -> torch.Tensor:
    heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
    found = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask, is_causal=causal)
    return found.transpose(1, 2).flatten(2)


def by_keys(model: Model, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return attend(x, mask[:, None, None, :] != 0)


def by_bias(model: Model, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    distance = torch.arange(x.shape[1])[None, :] - torch.arange(x.shape[1])[:, None]
    slopes = torch.tensor([0.5, 0.25], dtype=x.dtype)[:, None, None]
    bias = (-slopes * distance.abs().to(x.dtype))[None]
    return attend(x, bias.masked_fill(mask[:, None, None, :] == 0, torch.finfo(x.dtype).min))


def in_steps(model: Model, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = x @ x.transpose(1, 2) + (1 - mask[:, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
    return scores.softmax(-1) @ x


def trace(model: nn.Module, length: int = 9, **inputs: Any) -> GraphModule:
    given = {"ids": torch.randint(0, WORDS, (ROWS, length)), "mask": padded("right", length)} | inputs
    return refold.trace(model.eval(), **given)


def plans(gm: GraphModule) -> list[Any]:
    return [n for n in gm.graph.nodes if n.target is torch.ops.refold.token_plan.default]


def deviation(model: nn.Module, gm: GraphModule, kind: str, length: int, cast: Any = lambda mask: mask) -> float:
    """How far the packed graph is from the model, in float64, on a batch of its own."""
    ids = torch.randint(0, WORDS, (ROWS, length), generator=torch.Generator().manual_seed(length))
    mask = cast(padded(kind, length))
    with torch.no_grad():
        expected, found = model(ids, mask), gm(ids, mask)
    return float((expected - found).abs().nan_to_num(nan=0.0).max())


def is_packed(gm: GraphModule, mask: torch.Tensor, ids: torch.Tensor | None = None) -> bool:
    """Whether a call leaves anything out."""
    (plan,) = plans(gm)
    seen: list[int] = []

    class Watching(torch.fx.Interpreter):
        def run_node(self, n: Any) -> Any:
            value = super().run_node(n)
            if n is plan:
                seen.append(value.numel())
            return value

    ids = torch.randint(0, WORDS, mask.shape) if ids is None else ids
    with torch.no_grad():
        Watching(gm).run(ids, mask)
    return seen[0] < mask.shape[0] * mask.shape[-1]


SOUND: dict[str, Model] = {
    "token by token": Model(),
    "keys": Model(by_keys),
    "bias": Model(by_bias),
    "in steps": Model(in_steps),
    "causal": Model(lambda m, x, mask: attend(x, None, causal=True)),
    "first token": Model(by_keys, lambda x, mask, ids: x[:, 0]),
    "last token": Model(by_keys, lambda x, mask, ids: x[:, -1]),
    "last real token": Model(by_keys, lambda x, mask, ids: x[torch.arange(x.shape[0]), mask.sum(1) - 1]),
    "masked maximum": Model(by_keys, lambda x, mask, ids: x.masked_fill(mask[..., None] == 0, -1e9).amax(1)),
    "masked convolution": Model(lambda m, x, mask: m.conv((x * mask[..., None]).transpose(1, 2)).transpose(1, 2)),
}


@pytest.mark.parametrize("name", SOUND)
def test_packed_models_compute_the_same(name: str) -> None:
    torch.manual_seed(0)
    model = copy.deepcopy(SOUND[name]).to(F64)
    gm = trace(model)
    RemovePadding()(gm)
    assert len(plans(gm)) == 1, str(refold.result(gm))
    for kind in KINDS:
        for length in (9, 17):
            assert deviation(model, gm, kind, length) < 1e-14, kind
    side = "left" if name == "last token" else "right"
    assert is_packed(gm, padded(side, 17))
    assert not is_packed(gm, padded("full", 17))
    assert not is_packed(gm, padded("empty", 17))


UNSOUND: dict[str, Model] = {
    "unmasked mean": Model(by_keys, lambda x, mask, ids: x.mean(1)),
    "maximum": Model(by_keys, lambda x, mask, ids: x.amax(1)),
    "convolution": Model(lambda m, x, mask: m.conv(x.transpose(1, 2)).transpose(1, 2)),
    "attention to all": Model(lambda m, x, mask: attend(x, None)),
    "soft mask": Model(lambda m, x, mask: attend(x, (1 - mask[:, None, None, :].to(x.dtype)) * -100.0)),
    "bounded mask": Model(lambda m, x, mask: attend(x, (1 - mask[:, None, None, :].to(x.dtype)) * -1e4)),
    "roll": Model(lambda m, x, mask: x.roll(1, 1) + x),
    "softmax of tokens": Model(lambda m, x, mask: x.softmax(1)),
    "backward sum": Model(lambda m, x, mask: x.flip(1).cumsum(1).flip(1)),
    "transform": Model(lambda m, x, mask: torch.fft.fft(x, dim=1).real),
    "chosen tokens": Model(lambda m, x, mask: x * (x.sum(-1) >= x.sum(-1).topk(4, 1).values[:, -1:])[..., None]),
    "ends of ids": Model(by_keys, lambda x, mask, ids: (x * (ids == 3)[..., None]).sum(1)),
    "other tokens": Model(lambda m, x, mask: F.pad(x[:, 1:], (0, 0, 0, 1)) + x),
}


@pytest.mark.parametrize("name", UNSOUND)
def test_models_that_read_padding_are_refused_or_stay_exact(name: str) -> None:
    torch.manual_seed(0)
    model = copy.deepcopy(UNSOUND[name]).to(F64)
    gm = trace(model)
    RemovePadding()(gm)
    for kind in KINDS:
        for length in (9, 17):
            assert deviation(model, gm, kind, length) < 1e-12, kind
    if not plans(gm):
        assert "changes what is computed at real tokens" in str(refold.result(gm)) or "token by token" in str(
            refold.result(gm)
        )


def test_sums_from_the_left_are_packed_for_padding_on_the_right_alone() -> None:
    model = Model(lambda m, x, mask: m.second(x).cumsum(1)).to(F64)
    gm = trace(model)
    RemovePadding()(gm)
    assert is_packed(gm, padded("right", 12))
    assert not is_packed(gm, padded("left", 12))
    assert all(deviation(model, gm, kind, 12) < 1e-14 for kind in KINDS)


def test_positions_found_in_ids_are_checked_in_every_call() -> None:
    """The last token that is not 0: where ids and mask disagree, the call is not packed."""

    def last(x: torch.Tensor, mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1]) * (ids != 0)
        return x[torch.arange(x.shape[0]), places.argmax(-1)]

    model = Model(by_keys, last).to(F64)
    gm = trace(model)
    RemovePadding()(gm)
    mask = padded("right", 9)
    agreeing = torch.randint(1, WORDS, (ROWS, 9)) * mask
    assert is_packed(gm, mask, agreeing)
    assert not is_packed(gm, mask, torch.randint(1, WORDS, (ROWS, 9)))
    with torch.no_grad():
        for ids in (agreeing, torch.randint(1, WORDS, (ROWS, 9)), torch.zeros_like(agreeing)):
            torch.testing.assert_close(gm(ids, mask), model(ids, mask), rtol=0, atol=1e-14)


@pytest.mark.parametrize("cast", [torch.bool, torch.float64, torch.int32])
def test_masks_of_other_dtypes(cast: torch.dtype) -> None:
    model = Model(by_keys).to(F64)
    gm = trace(model, mask=padded("right", 9).to(cast))
    RemovePadding()(gm)
    assert is_packed(gm, padded("left", 9).to(cast))
    assert all(deviation(model, gm, kind, 9, lambda mask: mask.to(cast)) < 1e-14 for kind in KINDS)
    if cast != torch.bool:
        half = padded("right", 9).to(cast) * 2
        assert not is_packed(gm, half)


class Grid4d(Model):
    """A model that is given its mask for every query and key."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(self.words(ids)))
        return self.second(attend(x, mask))[:, 0]


@pytest.mark.parametrize("added", [False, True])
def test_masks_for_queries_and_keys(added: bool) -> None:
    def widened(mask: torch.Tensor) -> torch.Tensor:
        opened = (mask != 0)[:, None, None, :]
        return (
            torch.zeros(opened.shape, dtype=F64).masked_fill(~opened, torch.finfo(F64).min) if added else opened.clone()
        )

    torch.manual_seed(0)
    model = Grid4d().to(F64)
    rows, length = torch.export.Dim("rows", min=2), torch.export.Dim("length", min=2)
    sizes = ({0: rows, 1: length}, {0: rows, 3: length})
    inputs = (torch.randint(0, WORDS, (ROWS, 9)), widened(padded("right", 9)))
    gm: Any = torch.export.export(model.eval(), inputs, dynamic_shapes=sizes, strict=False).module(check_guards=False)
    RemovePadding()(gm)
    assert is_packed(gm, widened(padded("right", 9)), torch.randint(0, WORDS, (ROWS, 9)))
    assert all(deviation(model, gm, kind, 9, widened) < 1e-14 for kind in KINDS)


def test_values_given_out_at_padding_are_left_alone_or_zeros() -> None:
    torch.manual_seed(0)
    model = Model(by_keys, lambda x, mask, ids: x).to(F64)
    gm = trace(model)
    RemovePadding()(gm)
    assert "RemovePadding(padding='zeros')" in str(refold.result(gm))
    zeros = RemovePadding(padding="zeros")
    assert not zeros.preserves_computation
    assert RemovePadding().preserves_computation
    zeros(gm)
    for kind in KINDS:
        ids, mask = torch.randint(0, WORDS, (ROWS, 9)), padded(kind, 9)
        with torch.no_grad():
            found, expected = gm(ids, mask), model(ids, mask)
        real = mask != 0
        torch.testing.assert_close(found[real], expected[real], rtol=0, atol=1e-14)
        assert not found[~real].any(), f"{kind}: zeros at padding on every way"


@pytest.mark.parametrize("middle", [by_keys, by_bias, in_steps])
def test_gradients_are_those_of_the_padded_batch(middle: Any) -> None:
    torch.manual_seed(0)
    model = Model(middle).to(F64).train()
    ids, mask = torch.randint(0, WORDS, (ROWS, 9)), padded("right", 9)
    gm = refold.trace(copy.deepcopy(model), ids=ids, mask=mask)
    RemovePadding()(gm)
    assert len(plans(gm)) == 1
    model(ids, mask).square().sum().backward()
    gm(ids, mask).square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for name, parameter in gm.named_parameters():
        if expected[name] is not None:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=1e-12)


def test_without_open_sizes_nothing_is_packed() -> None:
    gm = refold.trace(Model().eval(), ids=torch.randint(0, WORDS, (ROWS, 9)), mask=padded("right", 9), dynamic=False)
    RemovePadding()(gm)
    assert not plans(gm)


def test_exporting_to_onnx_is_refused_with_the_way_out() -> None:
    pytest.importorskip("onnxscript", reason="torch.onnx needs onnxscript")
    model = Model(by_keys).eval()
    gm = trace(model)
    RemovePadding()(gm)
    example = (torch.randint(0, WORDS, (ROWS, 9)), padded("right", 9))
    with pytest.raises(torch.onnx.OnnxExporterError, match=r"to ONNX.*take RemovePadding back first"):
        torch.onnx.export(gm, example, dynamo=True, verbose=False)
    assert is_packed(gm, example[1])


def test_ahead_of_time_code_gives_none_for_lists_without_tensors() -> None:
    mask = padded("right", 9)
    for nothing in ([], None):
        found = token_operators._token_plan(mask, ROWS, 9, "any", 0.9, nothing, nothing)
        assert torch.equal(found, mask.flatten().nonzero().squeeze(1))


TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "pad_token_id": 0, "use_cache": False}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: tf.BertForSequenceClassification(tf.BertConfig(**TINY)),
    "roberta": lambda: tf.RobertaForSequenceClassification(tf.RobertaConfig(**TINY)),
    "deberta": lambda: tf.DebertaV2ForSequenceClassification(
        tf.DebertaV2Config(**TINY, relative_attention=True, pos_att_type=["p2c", "c2p"])
    ),
    "gpt2": lambda: tf.GPT2ForSequenceClassification(tf.GPT2Config(**GPT2)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_packed_verified_and_restored(family: str) -> None:
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    inputs = {"input_ids": torch.randint(2, 40, (ROWS, 9)) * padded("right", 9), "attention_mask": padded("right", 9)}
    gm = refold.trace(model, **inputs)
    code = gm.code
    RemovePadding()(gm)
    assert len(plans(gm)) == 1, str(refold.result(gm))
    verification = refold.verify(gm, inputs)
    assert verification.right, str(verification)
    precise, packed = copy.deepcopy(model).double(), refold.trace(copy.deepcopy(model).double(), **inputs)
    RemovePadding()(packed)
    for kind in KINDS:
        mask = padded(kind, 14)
        given = {"input_ids": torch.randint(2, 40, (ROWS, 14)), "attention_mask": mask}
        with torch.no_grad():
            difference = precise(**given).logits - packed(**given).logits
        assert float(difference.abs().max()) < 1e-13, kind
    refold.undo(gm)
    assert gm.code == code


def test_a_classifier_that_leaves_padding_out_is_saved_and_loaded(tmp_path: Path) -> None:
    settings = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    model = tf.BertForSequenceClassification(tf.BertConfig(num_hidden_layers=1, **settings)).eval()
    mask = (torch.arange(7) < torch.tensor([7, 3, 4])[:, None]).long()
    call = {"input_ids": torch.randint(1, 50, mask.shape) * mask, "attention_mask": mask}
    with torch.no_grad():
        gm = refold.trace(model, dynamic="auto", **call)
        for rule in (refold.SelectEarly(), refold.MergeLinears(), RemovePadding()):
            rule(gm)
        assert len(refold.history(gm)) == 3
        refold.save(gm, tmp_path / "packed")
        loaded = refold.load(tmp_path / "packed", model)
        assert loaded.code == gm.code and torch.equal(loaded(**call).logits, gm(**call).logits)
