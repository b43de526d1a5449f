"""The report as data and text: round trips, reading a graph, numbers JSON cannot hold, bad files."""

import copy
import json
import math
import operator
import time
from xml.etree import ElementTree

import pytest
import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from refold.errors import RefoldError
from refold.report import (
    BadReport,
    Calls,
    ExactnessSummary,
    ExecutorRow,
    GraphData,
    GraphNode,
    Headroom,
    LeftOut,
    Machine,
    ModelSummary,
    NodeLink,
    OutputError,
    Ratio,
    RefusalRow,
    Report,
    RewriteCard,
    SiteRow,
    TimingBar,
    graph_data,
)
from refold.report.timing_plot import timing_plot


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.key = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.query(x) + self.key(x))


class Stack(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Block() for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = layer(x)
        return (x * self.scale).reshape(-1)


def full_report() -> Report:
    verification = ExactnessSummary(
        "within rounding", "As exact as the original.", True, (OutputError("y", math.inf, 0.0),)
    )
    return Report(
        title="A small model",
        model=ModelSummary("Stack", 44),
        speedup=Ratio(1.5, 1.4, 1.6),
        exactness=verification,
        steps=(
            RewriteCard(
                name="MergeLinears",
                status="kept",
                kind="structural",
                signature="12345678901234567890",
                algebra="W' = [Wq; Wk]",
                sites=(SiteRow("layer.0", ("a", "b"), ("c",)), SiteRow("layer.1", ("d",), ("e",))),
                refusals=(RefusalRow("f", "it is read twice"),),
                verification=verification,
                gain=Ratio(1.1, 1.0, 1.2),
            ),
            RewriteCard("FuseNothing", "taken back", sites=(SiteRow("x"),), gain=Ratio(0.9, 0.8, 0.95)),
        ),
        timings=(
            TimingBar("original", 0.012, 0.011, 0.013, "eager", "original"),
            TimingBar("refold", 8e-7, 7e-7, 9e-7),
        ),
        executors=(ExecutorRow("eager", "chosen", "", 0.01), ExecutorRow("openvino", "not tried", "is not installed")),
        machine=Machine("two cores", (("torch", "2.13"),)),
        graph_before=GraphData((GraphNode("a", "placeholder", "a"), GraphNode("b", "output", "output", inputs=("a",)))),
        graph_after=GraphData((GraphNode("c", "placeholder", "a", provenance=("a",)),)),
        links=(NodeLink(("a", "b"), ("c",), (0,)),),
        notes=("one note",),
        created="today",
    )


def test_json_gives_an_equal_report_back() -> None:
    report = full_report()
    again = Report.from_json(report.to_json())
    assert again == report
    assert again.steps[0].verification is not None
    assert again.steps[0].verification.outputs[0].error == math.inf


def test_the_smallest_report_makes_a_round_trip() -> None:
    report = Report("t", ModelSummary("M"))
    assert Report.from_json(report.to_json()) == report
    assert "not measured" in str(report) and "not verified" in str(report)


def test_json_is_strict_and_says_its_schema() -> None:
    text = full_report().to_json()
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (data["schema"], data["version"]) == ("refold.report", 1)
    assert data["graph_before"]["nodes"]["columns"][0] == "id"


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: data.update(version=99), "version 99"),
        (lambda data: data.update(schema="other"), "no report"),
        (lambda data: data.update(title=3), "report.title should be str"),
        (lambda data: data.pop("model"), "cannot be read as a Report"),
        (lambda data: data["steps"][0].update(status="maybe"), r"report.steps\[0\].status should be one of"),
        (lambda data: data["speedup"].update(low="fast"), "report.speedup.low should be a number"),
        (lambda data: data["graph_after"].update(nodes=[]), "a table of columns and rows"),
        (lambda data: data["machine"].update(versions=[["torch"]]), "a list of 2"),
    ],
)
def test_a_damaged_report_is_refused_with_the_place(damage, sentence: str) -> None:  # type: ignore[no-untyped-def]
    data = json.loads(full_report().to_json())
    damage(data)
    with pytest.raises(BadReport, match=sentence) as caught:
        Report.from_json(json.dumps(data))
    assert isinstance(caught.value, RefoldError)


def test_text_that_is_not_json_is_refused() -> None:
    with pytest.raises(BadReport, match="not JSON"):
        Report.from_json("<html>")


def test_text_summary_says_speed_exactness_and_changes() -> None:
    text = str(full_report())
    assert "1.50× faster (between 1.40× and 1.60×)" in text
    assert "within rounding: As exact as the original." in text
    assert "2 places by 1 of 2 transformations, 1 taken back, 1 refusals" in text
    assert "12 ms" in text and "800 ns" in text


@pytest.mark.parametrize(
    ("ratio", "sentence"),
    [
        (Ratio(1.24, 1.1, 1.4), "1.24× faster (between 1.10× and 1.40×)"),
        (Ratio(1.002, 1.001, 1.003), "1.002× faster (between 1.001× and 1.003×)"),
        (Ratio(0.8, 0.7, 0.9), "slower: 0.80× (between 0.70× and 0.90×)"),
        (Ratio(1.24, 0.9, 1.61), "not decided: between 0.90× and 1.61×"),
        (Ratio(1.24, 1.0, 1.61), "not decided: between 1.00× and 1.61×"),
        (Ratio(0.5, 0.2, 7.0), "not decided: between 0.20× and 7.00×"),
        (Ratio(1.0, 0.9996, 1.0004), "not decided: between 0.9996× and 1.0004×"),
    ],
)
def test_the_interval_alone_says_faster_slower_or_not_decided(ratio: Ratio, sentence: str) -> None:
    report = Report("t", ModelSummary("M"), speedup=ratio, steps=(RewriteCard("Step", "kept", gain=ratio),))
    texts = [*str(report).splitlines(), report._repr_html_()]
    said = [text for text in texts if "between" in text]
    assert len(said) == 3 and all(sentence in text for text in said)
    assert sum(word in said[0] for word in ("faster", "slower", "not decided")) == 1


def test_work_left_out_comes_before_how_exact_it_is() -> None:
    work = LeftOut("tokens", 4096, 1843, "padding is read by no output")
    headroom = Headroom("runs at 94 % of what torch.mm reaches here", 0.94)
    report = Report(
        "t", ModelSummary("M"), left_out=(work,), headroom=headroom, calls=Calls(7, 2, (("in training", 2),))
    )
    lines = str(report).splitlines()
    assert Report.from_json(report.to_json()) == report
    order = [line.split()[0] for line in lines if line.startswith("  ")]
    assert order == ["speed", "left", "headroom", "exactness", "changed", "calls", "model"]
    assert "2,253 of 4,096 tokens (55%), padding is read by no output" in str(report)
    assert "7 ran the fast way, 2 the original: 2 because in training" in str(report)


def test_memory_is_told_beside_each_way() -> None:
    ways = (ExecutorRow("engine", "chosen", "same error class", resident=3 * 2**28, peak=5 * 2**20),)
    text = str(Report("t", ModelSummary("M"), executors=ways))
    assert "chosen    engine  same error class, holds 768 MiB, needs 5 MiB during a call" in text


def test_the_plot_is_plain_svg_in_proportion() -> None:
    plot = ElementTree.fromstring(timing_plot((TimingBar("a", 0.03, 0.02, 0.04), TimingBar("b", 0.01, 0.01, 0.02))))
    first, second = [float(bar.get("width", "")) for bar in plot.iter("{http://www.w3.org/2000/svg}rect")]
    assert first / second == pytest.approx(3, rel=0.01) and "timings" in (plot.get("aria-label") or "")
    evil = timing_plot((TimingBar("<b onclick='x'>" * 9, 1.0, 0.9, 1.1),))
    assert "<b" not in evil and evil.count("<text") == 2
    assert timing_plot(()) == "" and "style" not in evil


def test_a_run_that_kept_the_original_says_so() -> None:
    report = Report("t", ModelSummary("M"), speedup=Ratio(1.0, 1.0, 1.0))
    assert "so the original runs" in str(report)


def test_rewrites_counts_only_what_was_kept() -> None:
    assert full_report().rewrites == 2


def test_notebook_table_escapes_every_name() -> None:
    evil = "<img src=x onerror=alert(1)>"
    report = Report(evil, ModelSummary(evil), exactness=ExactnessSummary(evil), steps=(RewriteCard(evil, "kept"),))
    html = report._repr_html_()
    assert "<img" not in html
    assert html.count("&lt;img") == 4


# ---- reading a graph


def by_name(graph: GraphData) -> dict[str, GraphNode]:
    return {node.id: node for node in graph.nodes}


def test_graph_data_of_a_traced_model() -> None:
    gm = fx.symbolic_trace(Stack())
    ShapeProp(gm).propagate(torch.zeros(3, 4))
    before = copy.deepcopy(gm.code)
    nodes = by_name(graph_data(gm))
    assert list(nodes) == [node.name for node in gm.graph.nodes]
    assert gm.code == before
    query = nodes["layer_0_query"]
    assert (query.op, query.target, query.module) == ("call_module", "layer.0.query", "layer.0")
    assert query.detail == "Linear(in_features=4, out_features=4, bias=True)"
    assert query.value == "float32 [3, 4]"
    assert nodes["relu_1"].module == "layer.1"
    assert nodes["add"].inputs == ("layer_0_query", "layer_0_key")
    assert nodes["add"].target == "operator.add"
    assert nodes["scale"].op == "get_attr" and nodes["scale"].module == ""
    assert nodes["reshape"].module == ""


def test_a_layer_that_cannot_say_its_settings_is_shown_by_its_class() -> None:
    """torch.fx leaves a forward of its own in a layer that is traced twice, and torch tells of all that lies there."""
    bag = nn.EmbeddingBag(4, 2)
    bag.forward = bag.forward  # type: ignore[method-assign]
    with pytest.raises(RecursionError):
        bag.extra_repr()
    gm = fx.symbolic_trace(nn.Sequential(bag))
    assert "EmbeddingBag()" in [node.detail for node in graph_data(gm).nodes]


def test_graph_data_of_an_exported_model() -> None:
    exported = torch.export.export(Stack(), (torch.zeros(3, 4),))
    nodes = by_name(graph_data(exported.graph_module))
    assert nodes["relu"].target == "aten.relu.default"
    assert nodes["relu"].module == "layer.0"
    assert nodes["relu"].value == "float32 [3, 4]"


def insert_after(gm: fx.GraphModule, name: str) -> fx.Node:
    """A new node without any meta behind the named one, as a rewrite makes them."""
    old = next(node for node in gm.graph.nodes if node.name == name)
    with gm.graph.inserting_after(old):
        made = gm.graph.call_function(operator.neg, (old,))
    old.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    return made


def test_nodes_without_a_module_stack_stand_between_their_neighbours() -> None:
    gm = fx.symbolic_trace(Stack())
    inside = insert_after(gm, "add")
    behind_it = insert_after(gm, inside.name)
    between = insert_after(gm, "relu")
    assert not inside.meta
    nodes = by_name(graph_data(gm))
    assert nodes[inside.name].module == nodes[behind_it.name].module == "layer.0"
    assert nodes[between.name].module == "layer"  # it reads layer.0, and layer.1 reads it
    assert nodes["reshape"].module == ""  # it reads layer.1 through mul, and the output reads it


def test_provenance_is_taken_over() -> None:
    gm = fx.symbolic_trace(Stack())
    nodes = by_name(graph_data(gm, {"add": ["layer_0_query", "layer_0_key"]}))
    assert nodes["add"].provenance == ("layer_0_query", "layer_0_key")


def test_model_code_is_not_run_for_a_label() -> None:
    class Loud(nn.Linear):
        def extra_repr(self) -> str:
            raise RuntimeError("a label must not run this")

    gm = fx.symbolic_trace(nn.Sequential(Loud(2, 2)), concrete_args=None)
    gm.add_module("loud", Loud(2, 2))
    with gm.graph.inserting_before(next(iter(gm.graph.nodes)).next):
        gm.graph.call_module("loud", (next(iter(gm.graph.nodes)),))
    assert by_name(graph_data(gm))["loud"].detail == "Loud"


def test_reading_a_graph_is_linear_in_nodes() -> None:
    def seconds(count: int) -> float:
        graph = fx.Graph()
        node = graph.placeholder("x")
        for _ in range(count):
            node = graph.call_function(torch.relu, (node,))
        graph.output(node)
        gm = fx.GraphModule(nn.Module(), graph)
        best = math.inf
        for _ in range(3):
            start = time.perf_counter()
            assert len(graph_data(gm)) == count + 2
            best = min(best, time.perf_counter() - start)
        return best

    # eight times the nodes: a quadratic reader would take 64 times as long
    assert seconds(8000) < 24 * seconds(1000)
