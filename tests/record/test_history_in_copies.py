"""The history goes where its module goes, and torch sees nothing of it."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

import refold
from refold.examples import attention_layers
from refold.testing import Portrait


def through_pickle(gm: GraphModule) -> GraphModule:
    return pickle.loads(pickle.dumps(gm))  # type: ignore[no-any-return]


def through_a_file(gm: GraphModule) -> GraphModule:
    memory = io.BytesIO()
    torch.save(gm, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)  # type: ignore[no-any-return]


def inside_another(gm: GraphModule) -> GraphModule:
    return copy.deepcopy(nn.ModuleList([nn.Linear(1, 1), gm]))[1]  # type: ignore[return-value]


WAYS = [copy.deepcopy, through_pickle, through_a_file, inside_another]


def merged() -> tuple[GraphModule, Portrait]:
    gm = symbolic_trace(attention_layers.attention()[0])
    before = Portrait.of(gm)
    return refold.MergeLinears()(gm), before


@pytest.mark.parametrize(("first", "second"), [*itertools.product(WAYS, WAYS)])
def test_a_copy_of_a_copy_can_be_undone(
    first: Callable[[GraphModule], GraphModule], second: Callable[[GraphModule], GraphModule]
) -> None:
    gm, before = merged()
    found = second(first(gm))
    assert len(refold.history(found)) == 1 and refold.history(found) is not refold.history(gm)
    assert before.differences(Portrait.of(refold.undo(found))) == []
    assert len(refold.history(gm)) == 1


def test_two_modules_that_share_a_history_are_copied_together() -> None:
    gm, _ = merged()
    other = GraphModule(gm, copy.deepcopy(gm.graph))
    refold.attach(other, refold.history(gm))
    copies = copy.deepcopy(nn.ModuleList([gm, other]))
    assert [len(refold.history(each)) for each in copies] == [1, 1]  # type: ignore[arg-type]


def test_a_copied_history_by_itself_is_attached_to_nothing() -> None:
    gm, _ = merged()
    plain = symbolic_trace(nn.ReLU())
    plain.notes = copy.deepcopy(refold.history(gm))
    assert not refold.history(copy.deepcopy(plain)) and len(refold.history(gm)) == 1


def test_a_module_rebuilt_from_its_graph_has_none() -> None:
    gm, _ = merged()
    assert not refold.history(GraphModule(gm, gm.graph)) and not refold.history(copy.copy(gm))


def names_of(gm: GraphModule) -> list[list[str]]:
    entries = [gm.named_modules(), gm.named_children(), gm.named_parameters(), gm.named_buffers(), gm.state_dict()]
    return [[entry if isinstance(entry, str) else entry[0] for entry in listed] for listed in entries]


def test_torch_sees_nothing_of_it() -> None:
    gm, _ = merged()
    names = names_of(gm)
    refold.commit(gm)
    assert names_of(gm) == names and "_refold" not in vars(gm)


@pytest.mark.parametrize("way", WAYS)
def test_changes_before_and_after_the_copy_are_undone(way: Callable[[GraphModule], GraphModule]) -> None:
    class Written(nn.Module):
        """A fetch before its use, an operator in place and a call on constants: pickling changes all three."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def forward(self, x):  # type: ignore[no-untyped-def]  # torch cannot unpickle annotations that are strings
            scale = self.scale
            y = self.a(x) + self.b(x)
            y += x
            return y * scale / 3.0 + torch.ones(4)

    gm = symbolic_trace(Written())
    before = Portrait.of(gm)
    refold.MergeLinears()(gm)
    found = refold.ChangeTrueDivToMulByInverse()(way(gm))
    assert [change.name for change in refold.history(found)] == ["MergeLinears", "ChangeTrueDivToMulByInverse"]
    assert before.differences(Portrait.of(refold.undo(found, None))) == []
