"""A graph module as rules see it: calls of layers with their tensors, readers of a tensor, writes in between."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import GraphModule, Node

from refold import fx_private
from refold.graph.aliasing import (
    follow,
    memory_roots,
    switches_gradients,
    switches_mode,
    tied_by_memory,
    written_by,
    written_memory,
)
from refold.graph.targets import find_module
from refold.graph.values import example_value

_Analysis = TypeVar("_Analysis")


@dataclass(frozen=True)
class Operand:
    """A tensor that the module owns, by its full name."""

    name: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class Call:
    """A call of an operator in any of its forms: `kind` is 'module', 'function' or 'aten'; `path` names the module."""

    node: Node
    kind: str
    input: Node
    path: str | None
    operands: dict[str, Operand]
    """The tensors by role: weight, bias, running_mean, ..."""
    settings: dict[str, Any] = field(default_factory=dict)
    """All settings, defaults too, one value for each axis where there are several."""
    given: dict[str, Any] = field(default_factory=dict)
    """The settings that a function is called with, as they are written."""
    dims: int = 0
    """Over how many axes of space it runs."""
    out_axis: int = 0
    """The weight's axis of outputs."""
    function: Any = None
    """The function of torch that computes the same."""
    order: tuple[str, ...] = ()
    """The order in which functions take the input and the tensors, by role."""

    @property
    def weight(self) -> torch.Tensor:
        """The weight."""
        return self.operands["weight"].tensor

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, if there is one."""
        return self.operands["bias"].tensor if "bias" in self.operands else None

    @property
    def name(self) -> str:
        """The path of its module, or the path at which its weight lies."""
        return self.path or self.operands["weight"].name.removesuffix(".weight")

    @property
    def width(self) -> int:
        """The number of outputs."""
        return int(self.weight.shape[self.out_axis])


class GraphView:
    """A graph module with the questions that matchers ask, each answered in one pass over the graph."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.nodes = list(gm.graph.nodes)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self._analyses: dict[object, Any] = {}

    @cached_property
    def calls(self) -> dict[str, list[Node]]:
        """The nodes that call the module at a path, or fetch the attribute of that name."""
        found: dict[str, list[Node]] = defaultdict(list)
        for node in self.nodes:
            if node.op in ("call_module", "get_attr"):
                found[str(node.target)].append(node)
        return found

    @cached_property
    def writers(self) -> list[int]:
        """The positions of nodes that write in place."""
        return [i for i, node in enumerate(self.nodes) if written_by(self.gm, node)]

    @cached_property
    def written(self) -> dict[Node, Node]:
        """Every value that may be written into in place, with the node that writes."""
        found: dict[Node, Node] = {}
        for writer in (self.nodes[i] for i in self.writers):
            for target in written_by(self.gm, writer):
                for node in (writer, *memory_roots(self.gm, target)):
                    found.setdefault(node, writer)
        return found

    @cached_property
    def gradient_regions(self) -> dict[Node, int]:
        """The region of each node; a new one begins where gradients are switched on or off."""
        return dict(zip(self.nodes, accumulate(map(switches_gradients, self.nodes)), strict=True))

    @cached_property
    def written_memory(self) -> set[Node]:
        """Every value in whose memory some node writes, or may, tensors of the module under all their names."""
        return written_memory(self.gm, self.nodes)

    def writers_between(self, start: Node, stop: Node) -> list[Node]:
        """The nodes between two others that write in place."""
        return [self.nodes[i] for i in self._between(self.writers, start, stop)]

    @cached_property
    def mode_switches(self) -> list[int]:
        """The positions of nodes that switch gradients, autocast or inference mode."""
        return [i for i, node in enumerate(self.nodes) if switches_mode(node)]

    def mode_switches_between(self, start: Node, stop: Node) -> list[Node]:
        """Nodes between two others that switch a mode."""
        return [self.nodes[i] for i in self._between(self.mode_switches, start, stop)]

    def _between(self, positions: list[int], start: Node, stop: Node) -> list[int]:
        low, high = (bisect_left(positions, self.position[node]) for node in (start, stop))
        return positions[low:high]

    def region(self, node: Node) -> tuple[int, int]:
        """The same for nodes between which nothing is written in place (first) and no mode is switched (second)."""
        place = self.position[node]
        return bisect_left(self.writers, place), bisect_left(self.mode_switches, place)

    def needed_for(
        self, node: Node, known: Container[Node], is_leaf: Callable[[Node], bool] = lambda node: False
    ) -> list[Node]:
        """A node and all that it is made from, inputs first, without what is known; leaves need no inputs."""
        if node in known:
            return []
        found = follow([node], lambda n: [] if is_leaf(n) else [i for i in n.all_input_nodes if i not in known])
        return sorted([node, *found], key=self.position.__getitem__)

    def needed_for_all(self, nodes: Iterable[Node]) -> list[Node]:
        """Some nodes and all that they are made from, inputs first."""
        found = {n for node in nodes for n in self.needed_for(node, ())}
        return sorted(found, key=self.position.__getitem__)

    def analysis(self, kind: Callable[..., _Analysis], **settings: Any) -> _Analysis:
        """An analysis of this graph, made from this view when it is first needed."""
        key = (kind, *settings.items())
        if key not in self._analyses:
            self._analyses[key] = kind(self, **settings)
        return self._analyses[key]

    @cached_property
    def tensor_names(self) -> dict[int, list[str]]:
        """Every name under which a tensor is registered."""
        found: dict[int, list[str]] = defaultdict(list)
        for name, tensor in fx_private.named_tensors(self.gm).items():
            found[id(tensor)].append(name)
        return found

    @cached_property
    def tied(self) -> dict[int, str]:
        """Tensors that share memory with others: for the identity of each, the name of another one."""
        return tied_by_memory(self.gm)

    @cached_property
    def recorded_dtypes_hold(self) -> bool:
        """Whether the dtypes that capture recorded are still those of the module's tensors."""
        return all(_dtype_holds(self, node) for node in self.nodes)

    def module(self, path: str) -> nn.Module | None:
        """The module at a path."""
        return find_module(self.gm, path)

    def operand(self, node: Any) -> Operand | None:
        """The tensor that a get_attr node fetches."""
        if not isinstance(node, Node) or node.op != "get_attr":
            return None
        tensor = fx_private.find_tensor(self.gm, str(node.target))
        return None if tensor is None else Operand(str(node.target), tensor)

    def readers(self, operand: Operand) -> list[Node]:
        """Every node that reads a tensor: by fetching it, or by calling or fetching a module that holds it."""
        found = [node for name in self.tensor_names[id(operand.tensor)] for node in self.reached_by(name)]
        return list(dict.fromkeys(found))

    def reached_by(self, name: str) -> list[Node]:
        """Every node that calls or fetches what has this name, or a module that holds it."""
        parts = name.split(".")
        return [node for i in range(len(parts)) for node in self.calls.get(".".join(parts[: i + 1]), ())]


def _dtype_holds(view: GraphView, node: Node) -> bool:
    recorded = example_value(node)
    if recorded is None:
        return True
    if node.op == "get_attr":
        operand = view.operand(node)
        return operand is None or operand.tensor.dtype == recorded.dtype
    module = view.module(str(node.target)) if node.op == "call_module" else None
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or not recorded.is_floating_point():
        return True
    return weight.dtype == recorded.dtype
