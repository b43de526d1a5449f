"""The report of a run: plain data, text, a notebook table, JSON, and one offline HTML page."""

from refold.report.data import (
    ExecutorRow,
    GraphData,
    GraphNode,
    Machine,
    ModelSummary,
    NodeLink,
    OutputError,
    Ratio,
    Refusal,
    Report,
    RewriteCard,
    Site,
    TimingBar,
    Verification,
)
from refold.report.graph import graph_data
from refold.report.html import write_html
from refold.report.plain import BadReport

__all__ = [
    "BadReport",
    "ExecutorRow",
    "GraphData",
    "GraphNode",
    "Machine",
    "ModelSummary",
    "NodeLink",
    "OutputError",
    "Ratio",
    "Refusal",
    "Report",
    "RewriteCard",
    "Site",
    "TimingBar",
    "Verification",
    "graph_data",
    "write_html",
]
