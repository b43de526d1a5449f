"""An exported program of open sizes as it is at certain ones: every value is recorded with sizes that are numbers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from refold.errors import PreparationFailed
from refold.executors.value_ranges import held_by
from refold.fx_private import no_values
from refold.wording import first_line


@dataclass(frozen=True)
class SizedProgram:
    """A program at certain sizes, to be looked at: it is not run."""

    graph: Graph
    graph_signature: Any
    state_dict: dict[str, Any]
    constants: dict[str, Any]


def at_sizes(exported: ExportedProgram, shapes: Sequence[Sequence[int]]) -> SizedProgram:
    """The program where its inputs are of these shapes. Nothing is computed but sizes."""
    graph = copy.deepcopy(exported.graph)
    given = dict(zip(map(str, exported.graph_signature.user_inputs), shapes, strict=True))
    known: dict[Node, Any] = {}
    try:
        with no_values(), torch.no_grad():
            for node in graph.nodes:
                if node.op != "output":
                    known[node] = node.meta["val"] = _value(exported, node, given, known)
    except Exception as error:  # a size that depends on values, or a size that some operator does not take
        raise PreparationFailed(f"At the sizes {list(map(tuple, shapes))}: {first_line(error)}.") from error
    return SizedProgram(graph, exported.graph_signature, dict(exported.state_dict), dict(exported.constants))


def _value(exported: ExportedProgram, node: Node, given: Mapping[str, Sequence[int]], known: Mapping[Node, Any]) -> Any:
    """A value without numbers in it."""
    if node.op == "placeholder":
        held = held_by(exported, node)
        if held is not None:
            return torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device=held.device)
        like = node.meta["val"]
        return torch.empty(tuple(given[node.name]), dtype=like.dtype, device=like.device)
    if node.op != "call_function":
        raise PreparationFailed(f"{node.name} is a part of its own")
    args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
    return node.target(*args, **kwargs)  # type: ignore[operator]
