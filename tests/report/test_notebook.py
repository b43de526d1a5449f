"""Notebook manners: results show as tables, names in them are data, long histories stay readable, errors are short."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import refold
from refold.measurement.timing import measure, measure_many
from refold.report import ModelSummary, Report, RewriteCard, SiteRow
from refold.verification.verifier import verify

EVIL = "<script>alert('x')</script>"


class Tags(HTMLParser):
    """The tags that a browser would see, and the texts between them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def hostile_module() -> GraphModule:
    """A module with a child that is named like markup, twice, so that merging fires."""
    root = nn.Module()
    root.add_module(EVIL, nn.Linear(4, 4))
    root.add_module("other", nn.Linear(4, 4))
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_module(EVIL, (x,)), graph.call_module("other", (x,))))
    return GraphModule(root, graph)


class NamedLikeMarkup(refold.Transformation):
    """Adds nothing but a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def transform(self, graph_module: GraphModule) -> GraphModule:
        output = next(iter(reversed(graph_module.graph.nodes)))
        with graph_module.graph.inserting_before(output):
            graph_module.graph.call_function(torch.zeros, (1,))
        return graph_module


def shown() -> dict[str, Any]:
    """Everything that a user gets to see, with a hostile name in it."""
    gm = hostile_module()
    merged = refold.MergeLinears()(gm)
    result = refold.result(merged)
    checked = verify(merged, torch.ones(2, 4))
    refold.commit(merged)
    NamedLikeMarkup(EVIL)(merged)
    named = {EVIL: nn.Linear(4, 4), "b": nn.Linear(4, 4)}
    comparison = measure_many(named, torch.ones(1, 4), repeats=3)
    card = RewriteCard(EVIL, "kept", sites=(SiteRow(EVIL, (EVIL,), (EVIL,)),), note=EVIL)
    return {
        "Result": result,
        "History": refold.history(merged),
        "Verification": checked,
        "Measurement": comparison.between(EVIL, "b"),
        "Comparison": comparison,
        "Report": Report(EVIL, ModelSummary(EVIL), steps=(card,)),
    }


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return shown()


@pytest.mark.parametrize("kind", ["Result", "History", "Verification", "Measurement", "Comparison", "Report"])
def test_it_is_a_table_in_which_names_are_data(kind: str, results: dict[str, Any]) -> None:
    thing = results[kind]
    page = Tags(thing._repr_html_())
    assert "table" in page.tags and "tr" in page.tags
    assert "script" not in page.tags
    assert str(thing)
    if kind != "Verification":  # it names nodes, and torch.fx makes identifiers of those
        assert any("<script>" in text or "alert" in text for text in page.texts)


def test_a_long_history_is_readable() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(300))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([layer(x) for layer in self.layers])

    gm = refold.MergeLinears()(torch.fx.symbolic_trace(Wide()))
    past = refold.history(gm)
    count = len(past[0].describe())
    assert count > 600
    text = str(past)
    assert len(text.splitlines()) < 30
    assert f"and {count - 20} more lines" in text and "and" in past._repr_html_()
    short = refold.ChangeTrueDivToMulByInverse()(torch.fx.symbolic_trace(Halved()))
    assert "more lines" not in str(refold.history(short)) and "~ truediv" in str(refold.history(short))


class Halved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2.0


def test_errors_are_short() -> None:
    gm = torch.fx.symbolic_trace(Halved())
    with pytest.raises(refold.RefoldError) as nothing:
        refold.undo(gm)
    with pytest.raises(refold.RefoldError) as wrong:
        refold.MergeLinears()(Halved())
    with pytest.raises(refold.RefoldError) as failed:
        measure(Halved(), Halved(), (1, 2, 3), repeats=2)
    for error in (nothing, wrong, failed):
        assert len(str(error.value)) < 300 and "\n" not in str(error.value)
