"""The parts of a report, as plain data: what was rewritten, how exact it is, how fast it got, and both graphs.

Everything is a frozen dataclass of text, numbers and tuples; nothing here knows a tensor or a model. Every field that
can be left out has a default, so a report can be built from whatever is known.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from refold.report.json_data import encode

SCHEMA = "refold.report"
VERSION = 1

Status = Literal["kept", "taken back", "refused", "no match"]
Role = Literal["original", "refold", "other"]
Verdict = Literal["faster", "slower", "not decided"]
ExecutorStatus = Literal["chosen", "tried", "not tried"]


@dataclass(frozen=True)
class Ratio:
    """How many times faster (above 1) or slower (below 1), with the spread of the measurement."""

    median: float
    low: float
    high: float

    @property
    def verdict(self) -> Verdict:
        """What the spread says: only where it lies wholly on one side of 1, anything is decided."""
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "not decided"


@dataclass(frozen=True)
class Headroom:
    """How near the original comes to what this machine can multiply and move, in a sentence, and as a share."""

    sentence: str
    share: float | None = None  # of the limit, from 0 to 1


@dataclass(frozen=True)
class LeftOut:
    """Work of one kind (tokens, products) in a call of the original, and what is left of it."""

    unit: str
    before: float
    after: float
    why: str = ""

    @property
    def share(self) -> float:
        """How much of it is not done any more, from 0 to 1."""
        return 1 - self.after / self.before if self.before else 0.0


@dataclass(frozen=True)
class Calls:
    """How many calls of an optimized model ran the fast way, how many the original, and why: (reason, count) pairs."""

    fast: int = 0
    original: int = 0
    reasons: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class OutputError:
    """One output against the float64 reference: the rewritten model's error and the original's own."""

    name: str
    error: float
    baseline: float | None = None
    note: str = ""


@dataclass(frozen=True)
class ExactnessSummary:
    """A grade in a word or two, a sentence that explains it, and whether it passed (None: was not run)."""

    grade: str
    sentence: str = ""
    ok: bool | None = None
    outputs: tuple[OutputError, ...] = ()


@dataclass(frozen=True)
class SiteRow:
    """One place that a rewrite changed: node names in the graph before it and after it."""

    description: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class RefusalRow:
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
    sites: tuple[SiteRow, ...] = ()
    refusals: tuple[RefusalRow, ...] = ()
    verification: ExactnessSummary | None = None
    gain: Ratio | None = None
    note: str = ""


@dataclass(frozen=True)
class TimingBar:
    """One measured candidate, in seconds."""

    name: str
    median: float
    low: float
    high: float
    note: str = ""
    role: Role = "other"


@dataclass(frozen=True)
class ExecutorRow:
    """One way to run the model: whether it was tried and chosen, and if not, why not; the bytes it holds beside the
    model, and those that it needs at most during a call."""

    name: str
    choice: ExecutorStatus
    why: str = ""
    seconds: float | None = None
    resident: int | None = None
    peak: int | None = None


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
class ReportData:
    """The result of one run, as plain data."""

    title: str
    model: ModelSummary
    speedup: Ratio | None = None
    left_out: tuple[LeftOut, ...] = ()
    headroom: Headroom | None = None
    exactness: ExactnessSummary | None = None
    steps: tuple[RewriteCard, ...] = ()
    timings: tuple[TimingBar, ...] = ()
    executors: tuple[ExecutorRow, ...] = ()
    machine: Machine = Machine()
    graph_before: GraphData = GraphData()
    graph_after: GraphData = GraphData()
    links: tuple[NodeLink, ...] = ()
    notes: tuple[str, ...] = ()
    calls: Calls | None = None
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
