"""The report of a run: plain data, text, a notebook table, JSON, and one offline HTML page."""

from refold.errors import BadReport
from refold.report.data import (
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
    RewriteCard,
    SiteRow,
    TimingBar,
)
from refold.report.document import Report
from refold.report.graph_nodes import graph_data

__all__ = [
    "BadReport",
    "Calls",
    "ExactnessSummary",
    "ExecutorRow",
    "GraphData",
    "GraphNode",
    "Headroom",
    "LeftOut",
    "Machine",
    "ModelSummary",
    "NodeLink",
    "OutputError",
    "Ratio",
    "RefusalRow",
    "Report",
    "RewriteCard",
    "SiteRow",
    "TimingBar",
    "graph_data",
]
