"""A torch.fx graph as the plain data that the report draws, linear in the number of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from refold.report.data import GraphData, GraphNode
from refold.wording import settings_of

LONGEST_TEXT = 160


def graph_data(gm: fx.GraphModule, provenance: Mapping[str, Sequence[str]] | None = None) -> GraphData:
    """Every node of `gm` in order. `provenance` may name, for a node, the original nodes it came from."""
    origins = provenance or {}
    modules = dict(gm.named_modules(remove_duplicate=False))
    homes = containers(gm.graph)
    return GraphData(
        tuple(
            GraphNode(
                id=node.name,
                op=node.op,
                target=target_text(node),
                module=homes[node],
                detail=detail_text(node, modules),
                value=value_text(node),
                inputs=tuple(source.name for source in node.all_input_nodes),
                provenance=tuple(origins.get(node.name, ())),
            )
            for node in gm.graph.nodes
        )
    )


def containers(graph: fx.Graph) -> dict[fx.Node, str]:
    """For each node the path of the module it stands in.

    A node that a rewrite made often carries no module stack. It is put into the innermost module that holds all of its
    neighbours: the ones it reads (forwards) and the ones that read it (backwards), through other such nodes.
    """
    nodes = list(graph.nodes)
    known = {node: path for node in nodes if (path := known_container(node)) is not None}
    forwards = spread(nodes, known, lambda node: node.all_input_nodes)
    backwards = spread(nodes[::-1], known, lambda node: node.users)
    return {node: known.get(node, common_path((forwards.get(node), backwards.get(node)))) for node in nodes}


def known_container(node: fx.Node) -> str | None:
    if node.op in ("placeholder", "output"):
        return ""
    if node.op in ("call_module", "get_attr"):
        return str(node.target).rpartition(".")[0]
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    path = next(reversed(stack.values()))[0]
    return str(path).removeprefix("L['self']").removeprefix(".")


def spread(nodes: Iterable[fx.Node], known: Mapping[fx.Node, str], neighbours: Any) -> dict[fx.Node, str]:
    """Carry known paths along `neighbours`, in an order in which each neighbour comes before the node."""
    found = dict(known)
    for node in nodes:
        around = [found[other] for other in neighbours(node) if other in found]
        if node not in found and around:
            found[node] = common_path(around)
    return found


def common_path(paths: Iterable[str | None]) -> str:
    """The longest module path that all given paths lie in; None is no opinion."""
    present = [path.split(".") for path in paths if path is not None]
    if not present:
        return ""
    shortest = min(present, key=len)
    shared = 0
    while shared < len(shortest) and all(path[shared] == shortest[shared] for path in present):
        shared += 1
    return ".".join(shortest[:shared])


def target_text(node: fx.Node) -> str:
    if node.op != "call_function":
        return str(node.target)
    owner = (getattr(node.target, "__module__", None) or "").removeprefix("torch._ops.").removeprefix("_")
    name = getattr(node.target, "__name__", None) or str(node.target)
    return f"{owner}.{name}" if owner else name


def detail_text(node: fx.Node, modules: Mapping[str, torch.nn.Module]) -> str:
    """The class of a called module, and its sizes where the class is torch's own: no model code runs for a label."""
    if node.op != "call_module" or str(node.target) not in modules:
        return ""
    module = modules[str(node.target)]
    name = type(module).__name__
    if not type(module).__module__.startswith("torch.nn.modules"):
        return name
    return shorten(f"{name}({settings_of(module)})")


def value_text(node: fx.Node) -> str:
    """Dtype and shape of what the node computes, where the capture or shape propagation left them."""
    for key in ("val", "example_value", "tensor_meta"):
        if node.meta.get(key) is not None:
            return shorten(describe_value(node.meta[key]))
    return ""


def describe_value(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        sizes = ", ".join(str(size) for size in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')} [{sizes}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(describe_value(item) for item in value) + ")"
    if value is None or isinstance(value, bool | int | float | str | torch.SymInt | torch.SymFloat | torch.SymBool):
        return str(value)
    return type(value).__name__


def shorten(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"
