"""The report as plain data: what was rewritten, how exact it is, how fast it got, and both graphs.

Everything is a frozen dataclass of text, numbers and tuples; nothing here knows a tensor or a model. Every field that
can be left out has a default, so a report can be built from whatever is known.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from refold.report.plain import BadReport, decode, encode

SCHEMA = "refold.report"
VERSION = 1

Status = Literal["kept", "taken back", "refused", "no match"]
Role = Literal["original", "refold", "other"]
Choice = Literal["chosen", "tried", "not tried"]


@dataclass(frozen=True)
class Ratio:
    """How many times faster (above 1) or slower (below 1), with the spread of the measurement."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class OutputError:
    """One output against the float64 reference: the rewritten model's error beside the original's own."""

    name: str
    error: float
    baseline: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Verification:
    """A grade in a word or two, a sentence that explains it, and whether it passed (None: was not run)."""

    grade: str
    sentence: str = ""
    ok: bool | None = None
    outputs: tuple[OutputError, ...] = ()


@dataclass(frozen=True)
class Site:
    """One place that a rewrite changed: node names in the graph before it and after it."""

    description: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """A node that a rewrite left alone, and the sentence that says why."""

    node: str
    reason: str


@dataclass(frozen=True)
class RewriteCard:
    """All that is known about one transformation in one run."""

    name: str
    status: Status
    kind: str = ""  # "structural", "parametric", or empty where no weight is touched
    signature: str = ""  # text, because JavaScript cannot hold a 64-bit integer
    algebra: str = ""
    sites: tuple[Site, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    verification: Verification | None = None
    gain: Ratio | None = None
    note: str = ""


@dataclass(frozen=True)
class TimingBar:
    """One measured contender, in seconds."""

    name: str
    median: float
    low: float
    high: float
    note: str = ""
    role: Role = "other"


@dataclass(frozen=True)
class ExecutorRow:
    """One way to run the model: whether it was tried and chosen, and if not, why not."""

    name: str
    choice: Choice
    why: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class GraphNode:
    """One node. `module` is the path of the module it is drawn in; `provenance` names nodes of the original graph."""

    id: str
    op: str
    target: str
    module: str = ""
    detail: str = ""
    value: str = ""
    inputs: tuple[str, ...] = ()
    provenance: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphData:
    """A graph as a list of nodes in execution order."""

    nodes: tuple[GraphNode, ...] = field(default=(), metadata={"table": True})

    def __len__(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True)
class NodeLink:
    """Nodes of the original graph and the nodes of the final one that came from them, with the steps that did it.

    A node that is in no link and has the same name, op and target in both graphs is the same node.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelSummary:
    class_name: str
    parameters: int | None = None


@dataclass(frozen=True)
class Machine:
    """What the numbers were measured on: a sentence, and (name, version) pairs."""

    description: str = ""
    versions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Report:
    """The result of one run, ready to be shown as text, JSON, a notebook table or one offline page."""

    title: str
    model: ModelSummary
    speedup: Ratio | None = None
    exactness: Verification | None = None
    steps: tuple[RewriteCard, ...] = ()
    timings: tuple[TimingBar, ...] = ()
    executors: tuple[ExecutorRow, ...] = ()
    machine: Machine = Machine()
    graph_before: GraphData = GraphData()
    graph_after: GraphData = GraphData()
    links: tuple[NodeLink, ...] = ()
    notes: tuple[str, ...] = ()
    created: str = ""

    @property
    def kept(self) -> tuple[RewriteCard, ...]:
        return tuple(step for step in self.steps if step.status == "kept")

    @property
    def rewrites(self) -> int:
        """How many places of the final model differ because of a kept rewrite."""
        return sum(len(step.sites) for step in self.kept)

    def to_json(self) -> str:
        """The whole report as one JSON text; `from_json` gives an equal report back."""
        data: dict[str, Any] = {"schema": SCHEMA, "version": VERSION} | encode(self)
        return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Report:
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise BadReport(f"This is no report: it is not JSON ({error}). Give the text of `to_json`.") from error
        check_schema(data)
        report: Report = decode(cls, data)
        return report

    def to_html(self) -> str:
        """One self-contained page that needs no network."""
        from refold.report.html import page

        return page(self)

    def write_html(self, path: str | Path) -> Path:
        """Write the page to `path` whole or not at all."""
        from refold.report.html import write_html

        return write_html(self, path)

    def __str__(self) -> str:
        from refold.report.text import summary

        return summary(self)

    def _repr_html_(self) -> str:
        from refold.report.notebook import table

        return table(self)


def check_schema(data: Any) -> None:
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise BadReport(f'This is no report: its "schema" is not "{SCHEMA}". Give the text of `Report.to_json()`.')
    version = data.get("version")
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise BadReport(
            f"The report has version {version!r}, and this Refold reads 1 to {VERSION}. Update Refold to read it."
        )
