"""What the tests of single transformations share: rewrite, prove it, take it back, prove that; or be refused."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.fx import GraphModule

import refold
from refold import Transformation
from refold.fingerprint import same_bits
from refold.testing import LAWS, Portrait, check_law
from refold.testing.laws import graph_of

PROOFS = ("L2", "L3", "L13", "L15")  # tests/laws runs all of them on the examples of every rule


def rewritten(t: Transformation, model: nn.Module, *inputs: Any, sites: int | None = None) -> GraphModule:
    """The rewritten graph of a model, after the laws were checked on it; `sites` is how many rewrites are due."""
    for name in PROOFS:
        check_law(LAWS[name], t, model, inputs)
    gm = t(graph_of(copy.deepcopy(model)))
    if sites is not None:
        assert len(refold.result(gm).rewritten) == sites, str(refold.result(gm))
    return gm


def reasons(t: Transformation, model: nn.Module, *inputs: Any) -> str:
    """Why a model is left alone, all sentences together; it must be left alone exactly as it is."""
    gm = graph_of(model)
    before, expected = Portrait.of(gm), gm(*inputs)
    t(gm)
    assert before.differences(Portrait.of(gm), same_objects=True) == []
    assert len(refold.history(gm)) == 0
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (expected, gm(*inputs))), strict=True):
        assert same_bits(a, b)
    outcome = refold.result(gm)
    assert not outcome.rewritten
    return "\n".join([*(f"{r.node}: {r.reason}" for r in outcome.refused), outcome.note])


def targets(gm: GraphModule) -> list[str]:
    """What the nodes of a graph call, in order."""
    return [n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "") for n in gm.graph.nodes]
