"""What one call of a transformation did: what was rewritten, what was refused and why."""

from __future__ import annotations

import html
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import GraphModule


@dataclass(frozen=True)
class Rewritten:
    """One place that was (or would be) rewritten: the nodes it takes, and a sentence."""

    nodes: tuple[str, ...]
    what: str


@dataclass(frozen=True)
class Refused:
    """One place that was looked at and left alone, and why."""

    node: str
    reason: str


@dataclass(frozen=True)
class Result:
    """The outcome of a call (or, from `explain`, of a call that was not made)."""

    transformation: str
    rewritten: tuple[Rewritten, ...] = ()
    refused: tuple[Refused, ...] = ()
    note: str = ""

    def __bool__(self) -> bool:
        return bool(self.rewritten)

    def __str__(self) -> str:
        head = f"{self.transformation}: {_count(self.rewritten, 'rewrite')}, {_count(self.refused, 'refusal')}"
        lines = [head] + [f"  + {r.what}" for r in self.rewritten] + [f"  - {r.node}: {r.reason}" for r in self.refused]
        return "\n".join([*lines, f"  {self.note}"] if self.note else lines)

    def _repr_html_(self) -> str:
        rows = [("rewritten", ", ".join(r.nodes), r.what) for r in self.rewritten]
        rows += [("refused", r.node, r.reason) for r in self.refused]
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        title = html.escape(self.transformation)
        return f"<table><caption>{title}</caption><tr><th></th><th>nodes</th><th>why</th></tr>{body}</table>"


def _count(things: Iterable[object], word: str) -> str:
    number = len(tuple(things))
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"


# Without a lock: each access is one operation on a dict. A lock that Ctrl-C meets while it is being released stays
# locked, and every later call would wait for ever.
_results: weakref.WeakKeyDictionary[GraphModule, Result] = weakref.WeakKeyDictionary()


def set_result(gm: GraphModule, outcome: Result) -> None:
    """Remember the outcome of the latest call on a module; outside of it, so that the module itself is untouched."""
    _results[gm] = outcome


def result(gm: GraphModule) -> Result:
    """The outcome of the latest transformation that was called on this module."""
    return _results.get(gm, Result("nothing", note="No transformation was called on this module yet."))
