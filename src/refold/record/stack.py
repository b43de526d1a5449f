"""The stack of changes a module carries with it: pushed, printed, committed, detached."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch.fx import GraphModule

from refold import fx_private
from refold.errors import NotAGraphModule
from refold.record.change import Change, InitialOrder
from refold.record.outside_edits import ExpectedGraph
from refold.record.snapshot import LaterState, Snapshot

_MOST_LINES = 20


class History:
    """What was done to a module, oldest first. It goes where the module goes, through copies and pickles. It is never
    changed: a new one takes its place."""

    def __init__(
        self,
        changes: tuple[Change, ...] = (),
        initial_order: InitialOrder | None = None,
        expected: ExpectedGraph | None = None,
    ) -> None:
        self.changes = changes
        self.initial_order = initial_order
        self.expected = expected

    def __len__(self) -> int:
        return len(self.changes)

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    def __getitem__(self, index: int) -> Change:
        return self.changes[index]

    def __bool__(self) -> bool:
        return bool(self.changes)

    @property
    def nbytes(self) -> int:
        """The bytes of tensors and corrections that are held so that everything can be undone."""
        return sum(change.nbytes for change in self.changes)

    def __str__(self) -> str:
        if not self.changes:
            return "no changes"
        lines = []
        for i, change in enumerate(self.changes, 1):
            lines += [f"{i}. {change.label}  [{change.nbytes} bytes held]", *(f"   {x}" for x in _first_lines(change))]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        import html

        rows = "".join(
            f"<tr><td>{i}</td><td>{html.escape(c.label)}</td><td>{c.nbytes}</td>"
            f"<td><pre>{html.escape(chr(10).join(_first_lines(c)))}</pre></td></tr>"
            for i, c in enumerate(self.changes, 1)
        )
        return f"<table><tr><th></th><th>transformation</th><th>bytes held</th><th>what changed</th></tr>{rows}</table>"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "changes": tuple(change.without_metas() for change in self.changes)}

    def __deepcopy__(self, memo: dict[int, Any]) -> History:
        return History(
            copy.deepcopy(self.changes, memo),
            copy.deepcopy(self.initial_order, memo),
            copy.deepcopy(self.expected, memo),
        )


class _Carrier:
    """Holds the history of one module as a plain attribute: pickles of a GraphModule keep those, and torch sees nothing
    in them to script, move or store. Deep copies drop them, so a copy gets its own from here."""

    def __init__(self, history: History) -> None:
        self.history = history

    def __deepcopy__(self, memo: dict[int, Any]) -> _Carrier:
        carrier = _Carrier(copy.deepcopy(self.history, memo))
        module = fx_private.module_being_copied(memo)
        if module is not None:
            fx_private.set_plain_attribute(module, fx_private.HISTORY, carrier)
        return carrier


def _first_lines(change: Change) -> list[str]:
    """What a change did, but no more than people read; `change.describe()` has all of it."""
    lines = change.describe()
    if len(lines) <= _MOST_LINES:
        return lines
    return [*lines[:_MOST_LINES], f"… and {len(lines) - _MOST_LINES} more lines: change.describe() has them all"]


def check_graph_module(gm: object) -> GraphModule:
    """The module, if it is one that can be transformed."""
    if isinstance(gm, GraphModule):
        return gm
    what = f"the class {gm.__name__}" if isinstance(gm, type) else f"a {type(gm).__name__}"
    advice = "Capture it first: gm = refold.trace(model, *example_inputs), or torch.fx.symbolic_trace(model)."
    raise NotAGraphModule(f"a torch.fx.GraphModule is needed, and {what} was given. {advice}")


def history(gm: GraphModule) -> History:
    """The history that a module carries; an empty one if nothing was done to it."""
    carrier = vars(check_graph_module(gm)).get(fx_private.HISTORY)
    return carrier.history if isinstance(carrier, _Carrier) else History()


def push(gm: GraphModule, change: Change, before: Snapshot, after: LaterState) -> None:
    """Put a change on a module's history; it was derived from the snapshot before and the state after."""
    past = history(gm)
    initial_order = past.initial_order or InitialOrder(tuple(before.nodes), users=before.unsorted_users())
    initial_order = initial_order.with_tables_of(change)
    edits = () if past.expected is None else past.expected.edits
    attach(gm, History((*past.changes, change), initial_order, ExpectedGraph(gm.graph, after.graph.rows, edits)))


def settle(gm: GraphModule) -> None:
    """Let the history know the graph as it is: what pickling did to it is put right, what was edited is noted."""
    past = history(gm)
    if past.expected is not None:
        attach(gm, History(past.changes, past.initial_order, past.expected.settled(gm, len(past))))


def attach(gm: GraphModule, past: History) -> GraphModule:
    """Give a module a history, for instance one that `detach` took before the module was rebuilt from its graph."""
    if past.changes:
        fx_private.set_plain_attribute(check_graph_module(gm), fx_private.HISTORY, _Carrier(past))
    else:
        vars(check_graph_module(gm)).pop(fx_private.HISTORY, None)
    return gm


def detach(gm: GraphModule) -> History:
    """Take the history off a module, to keep it while the module is retraced or rebuilt; `attach` puts it back."""
    past = history(gm)
    attach(gm, History())
    return past


def commit(gm: GraphModule) -> GraphModule:
    """Drop all undo records: what was done stays, and can no longer be undone."""
    detach(gm)
    return gm
