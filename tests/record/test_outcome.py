"""What a call did can be read afterwards, from the module it was called on, and dies with it."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

import refold
from refold.examples import attention_layers
from refold.record.outcome import Refused, Result, Rewritten, _results, result, set_result
from refold.testing.faults import _call_traced, _Lines, executed_lines, of_refold

ONE = Result("T()", (Rewritten(("a", "b"), "a and b: joined"),), (Refused("c", "it has <hooks>"),))


def test_as_text() -> None:
    assert str(ONE) == "T(): 1 rewrite, 1 refusal\n  + a and b: joined\n  - c: it has <hooks>"
    assert str(Result("T()", note="Nothing in the graph matched.")) == (
        "T(): no rewrites, no refusals\n  Nothing in the graph matched."
    )


def test_as_html_with_everything_escaped() -> None:
    text = Result("T(x='<b>')", ONE.rewritten * 2, ONE.refused)._repr_html_()
    assert "<td>a, b</td>" in text and "it has &lt;hooks&gt;" in text and "T(x=&#x27;&lt;b&gt;&#x27;)" in text
    assert text.count("<tr>") == 4


def test_it_is_true_if_anything_was_rewritten() -> None:
    assert ONE and not Result("T()", (), ONE.refused)


def test_of_the_latest_call_on_this_module() -> None:
    gm = symbolic_trace(attention_layers.attention()[0])
    assert not refold.result(gm) and "No transformation was called" in refold.result(gm).note
    refold.MergeLinears()(gm)
    assert refold.result(gm).rewritten and refold.result(gm).transformation == "MergeLinears()"
    refold.FuseBatchNorm2dInConv2d()(gm)
    assert not refold.result(gm) and refold.result(gm).note == "Nothing in the graph matched."
    assert "No transformation" in refold.result(copy.deepcopy(gm)).note


def test_of_a_call_that_failed_there_is_none() -> None:
    class Fails(refold.Transformation):
        def transform(self, graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
            raise ValueError

    gm = symbolic_trace(attention_layers.attention()[0])
    refold.MergeLinears()(gm)
    before = refold.result(gm)
    with pytest.raises(ValueError):
        Fails()(gm)
    assert refold.result(gm) is before


def test_it_goes_with_the_module() -> None:
    gm = symbolic_trace(nn.Linear(1, 1))
    set_result(gm, ONE)
    count = len(_results)
    assert result(gm) is ONE
    del gm
    gc.collect()
    assert len(_results) < count


def test_an_interrupt_never_blocks_later_calls() -> None:
    """A lock would stay locked if Ctrl-C met it while it is released."""
    gm = symbolic_trace(nn.Linear(1, 1))
    for work in (lambda: set_result(gm, ONE), lambda: result(gm)):
        for place in range(len(executed_lines(work, of_refold))):
            with pytest.raises(KeyboardInterrupt):
                _call_traced(work, _Lines(of_refold, place, KeyboardInterrupt))
    later = threading.Thread(target=lambda: (set_result(gm, ONE), result(gm)), daemon=True)
    later.start()
    later.join(timeout=20)
    assert not later.is_alive()
