"""torch's own check of a graph, asked only where a quicker look leaves a doubt.

`Graph.lint` walks from the root to the target of every node, which is a tenth of what a small edit of a large graph
takes. Nearly every graph passes. The look here accepts only what lint accepts; everything else is for lint to judge.
"""

from __future__ import annotations

from torch import nn
from torch.fx import Graph, GraphModule, Node

from refold import fx_private

_OPS = frozenset({"placeholder", "get_attr", "call_function", "call_method", "call_module", "output"})


def lint(graph: Graph) -> None:
    """Raise what `graph.lint()` raises, if anything."""
    if not is_surely_well_formed(graph):
        graph.lint()


def is_surely_well_formed(graph: Graph) -> bool:
    """Whether lint would pass, for sure. `False` says nothing."""
    nodes = list(graph.nodes)
    if len({node.name for node in nodes}) != len(nodes) or not fx_private.are_listed(graph, nodes):
        return False
    earlier: set[Node] = set()
    for node, inputs in zip(nodes, fx_private.inputs_of(nodes), strict=True):
        if node.graph is not graph or node.op not in _OPS or not earlier.issuperset(inputs):
            return False
        earlier.add(node)
    return graph.owning_module is None or _have_targets(graph.owning_module, nodes)


def _have_targets(gm: GraphModule, nodes: list[Node]) -> bool:
    """Whether every target is of the right type, and what is read or called by name is there."""
    modules: dict[str, nn.Module | None] = {"": gm}
    for node in nodes:
        op, target = node.op, node.target
        if op == "call_function":
            if not callable(target):
                return False
        elif not isinstance(target, str):
            return False
        elif op == "call_module":
            if _module_at(target, modules) is None:
                return False
        elif op == "get_attr" and not _has_attribute(target, modules):
            return False
    return True


def _module_at(path: str, modules: dict[str, nn.Module | None]) -> nn.Module | None:
    """The module at a path, as its parents' tables have it; `modules` are those that were found already."""
    if path not in modules:
        parent, _, name = path.rpartition(".")
        holder = _module_at(parent, modules)
        modules[path] = None if holder is None else holder.__dict__.get("_modules", {}).get(name)
    return modules[path]


def _has_attribute(path: str, modules: dict[str, nn.Module | None]) -> bool:
    parent, _, name = path.rpartition(".")
    holder = _module_at(parent, modules)
    return holder is not None and getattr(holder, name, None) is not None
