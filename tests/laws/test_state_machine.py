"""Anything in any order: rewrites, raw edits, copies, pickles, undo in any legal order. A return is always exact."""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import nn
from torch.fx import GraphModule, symbolic_trace

import refold
from refold import (
    ChangeTrueDivToMulByInverse,
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    FuseBiasInLinear,
    MergeLinears,
    Transformation,
)
from refold.rewrite.rule import Example
from refold.testing import Portrait
from refold.testing.equivalence import as_float64, deviations
from refold.testing.random_models import random_models


class RawEdit(Transformation):
    """Somebody else's transformation: raw edits of nodes, arguments, modules and attributes."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph = graph_module.graph
        calls = [n for n in graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
        last = calls[-1]
        if self.kind == "insert":
            with graph.inserting_after(last):
                twin = graph.call_function(torch.neg, (last,))
            last.replace_all_uses_with(twin, delete_user_cb=lambda user: user is not twin)
        elif self.kind == "target" and last.target is torch.neg:
            last.target = torch.abs
        elif self.kind == "erase" and last.target in (torch.neg, torch.abs):
            last.replace_all_uses_with(last.args[0])
            graph.erase_node(last)
        elif self.kind == "module":
            with graph.inserting_after(last):
                graph_module.add_submodule(f"extra_{len(refold.history(graph_module))}", nn.Linear(4, 4))
                twin = graph.call_module(f"extra_{len(refold.history(graph_module))}", (last,))
            last.replace_all_uses_with(twin, delete_user_cb=lambda user: user is not twin)
        elif self.kind == "attribute":
            graph_module.note = len(refold.history(graph_module))
        elif self.kind == "rename":
            last.name = f"renamed_{len(refold.history(graph_module))}"
        elif self.kind == "container":
            module = graph_module.get_submodule(next((n.target for n in calls if n.op == "call_module"), ""))
            module.__dict__.setdefault("notes", []).append(len(refold.history(graph_module)))
        elif self.kind == "freeze":
            for parameter in [*graph_module.parameters()][:1]:
                parameter.requires_grad_(not parameter.requires_grad)
        elif self.kind == "order":
            fetches = [n for n in graph.nodes if n.op == "get_attr"]
            if fetches:
                next(iter(graph.nodes)).prepend(fetches[-1])
        return graph_module


REWRITES: dict[str, Transformation] = {
    "merge": MergeLinears(),
    "bias": FuseBiasInLinear(),
    "division": ChangeTrueDivToMulByInverse(),
    "convolution": FuseBatchNorm2dInConv2d(),
    "norm": FuseBatchNorm1dInLinear(keep="original"),
}
RAW = ["insert", "target", "erase", "module", "attribute", "rename", "container", "freeze", "order"]
DEEP = bool(os.environ.get("REFOLD_DEEP"))  # for an hour's run by hand


class Anything(RuleBasedStateMachine):
    """States are remembered by the changes that lead to them; whoever comes back finds them exactly as they were."""

    @initialize(example=random_models(2))
    def begin(self, example: Example) -> None:
        model, self.inputs = example
        self.gm = symbolic_trace(model)
        self.start = copy.deepcopy(self.gm)
        self.keys: list[int] = []
        self.count = 0
        self.held: list[Any] = [*self.gm.parameters()]
        self.known = {(): Portrait.of(self.gm)}
        self.is_renamed = False

    def _apply(self, t: Transformation) -> None:
        self.is_renamed = False
        length = len(refold.history(self.gm))
        t(self.gm)
        if len(refold.history(self.gm)) > length:
            self.count += 1
            self.keys.append(self.count)
            self.held += [*self.gm.parameters()]
        if tuple(self.keys) not in self.known:
            self.known[tuple(self.keys)] = Portrait.of(self.gm)
        else:
            self._compare()

    def _compare(self) -> None:
        known = self.known.setdefault(tuple(self.keys), Portrait.of(self.gm))
        found = known.differences(Portrait.of(self.gm))
        assert found == [], found

    @rule(name=st.sampled_from(sorted(REWRITES)))
    def rewrite(self, name: str) -> None:
        self._apply(REWRITES[name])

    @rule(kind=st.sampled_from(RAW))
    def edit(self, kind: str) -> None:
        self._apply(RawEdit(kind))

    @rule(twice=st.booleans())
    def deepcopy(self, twice: bool) -> None:
        before = Portrait.of(self.gm)
        self.gm = copy.deepcopy(copy.deepcopy(self.gm) if twice else self.gm)
        assert before.differences(Portrait.of(self.gm)) == []
        if not self.is_renamed:
            self._compare()

    @rule()
    def pickle(self) -> None:
        self.gm = pickle.loads(pickle.dumps(self.gm))  # renames nodes, until the history is used again
        self.is_renamed = bool(self.keys)
        self.known = {keys: p for keys, p in self.known.items() if keys != tuple(self.keys) or keys == ()}
        if not self.keys:
            self.known = {(): Portrait.of(self.gm)}

    @precondition(lambda self: self.keys)
    @rule()
    def undo_latest(self) -> None:
        refold.undo(self.gm)
        self.keys.pop()
        self._compare()

    @precondition(lambda self: len(self.keys) > 1)
    @rule(data=st.data())
    def undo_any(self, data: Any) -> None:
        place = data.draw(st.integers(0, len(self.keys) - 1))
        before = Portrait.of(self.gm)
        from refold.record.reversal import undo_chosen

        try:
            undo_chosen(self.gm, [place])
        except refold.OutOfOrder:
            assert before.differences(Portrait.of(self.gm), same_objects=True) == []
            return
        self.keys.pop(place)
        self._compare()

    @precondition(lambda self: self.keys)
    @rule()
    def undo_all(self) -> None:
        refold.undo(self.gm, None)
        self.keys = []
        self._compare()
        assert list(deviations(as_float64(self.start), as_float64(self.gm), as_float64(self.inputs))) == []

    def teardown(self) -> None:
        if getattr(self, "keys", None):
            self.undo_all()


TestAnything = Anything.TestCase
TestAnything.settings = settings(
    max_examples=150 if DEEP else 15,
    stateful_step_count=14 if DEEP else 8,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
