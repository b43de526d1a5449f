"""The report counts the work that a rewritten graph leaves out, and the counts are those made by hand."""

from __future__ import annotations

import pytest
import torch

import refold

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

WIDTH, INNER, LAYERS, HEADS, LABELS = 32, 64, 2, 2, 3


@pytest.fixture(scope="module")
def report() -> refold.report.Report:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    config = transformers.BertConfig(vocab_size=50, num_attention_heads=HEADS, num_labels=LABELS, **sizes)
    model = transformers.BertForSequenceClassification(config).eval()
    mask = (torch.arange(20) < torch.tensor([20, 3, 5, 4])[:, None]).long()
    example = {"input_ids": torch.randint(1, 50, mask.shape) * mask, "attention_mask": mask}
    return refold.optimize(model, example, pipeline=[refold.RemovePadding()], backend="plain", effort="quick").report


def products(lengths: list[int]) -> int:
    """Of rows of these lengths: linear layers of each token, attention within each row, and the head."""
    linear = sum(lengths) * (4 * WIDTH * WIDTH + 2 * WIDTH * INNER)
    attention = sum(2 * n * n * WIDTH for n in lengths)
    return LAYERS * (linear + attention) + len(lengths) * (WIDTH * WIDTH + WIDTH * LABELS)


def test_tokens_and_products_are_counted(report: refold.report.Report) -> None:
    tokens, counted = report.left_out
    assert (tokens.unit, tokens.before, tokens.after) == ("tokens", 80, 32)
    assert (counted.unit, counted.before, counted.after) == ("products", products([20] * 4), products([20, 3, 5, 4]))


def test_the_report_shows_them_beside_the_time(report: refold.report.Report) -> None:
    lines = [line.strip() for line in str(report).splitlines()]
    assert any(line.startswith("left out   48 of 80 tokens (60%)") for line in lines)
    assert "48 of 80 tokens (60%)" in report._repr_html_()
    assert '"unit":"tokens","before":80,"after":32' in report.to_html().replace("80.0", "80").replace("32.0", "32")


def test_nothing_is_told_where_nothing_is_left_out() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
    assert refold.optimize(model, torch.randn(2, 4), backend="plain", effort="quick").report.left_out == ()
