"""Devices that capture wrote into the graph are replaced by the device of an input, so that the graph can move."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate


def unpin(graph: fx.Graph) -> int:
    """Let every node that names a device follow the first tensor the graph is given; returns how many did."""
    pinned = [n for n in graph.nodes if n.op == "call_function" and _names_device(n)]
    device = _device_node(graph) if pinned else None
    if device is None:
        return 0
    for node in pinned:
        node.args = map_aggregate(node.args, lambda a: device if isinstance(a, torch.device) else a)
        node.kwargs = map_aggregate(node.kwargs, lambda a: device if isinstance(a, torch.device) else a)
    return len(pinned)


def _names_device(node: fx.Node) -> bool:
    found: list[Any] = []
    map_aggregate((node.args, node.kwargs), lambda a: found.append(a) if isinstance(a, torch.device) else None)
    return bool(found)


def _device_node(graph: fx.Graph) -> fx.Node | None:
    """A node for the device of the first input, or of the first parameter where no input is a tensor."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    tensors = (n for n in graph.nodes if n.op != "call_module" and isinstance(n.meta.get("val"), torch.Tensor))
    anchor = next(tensors, None)
    if anchor is None or (anchor.op == "call_function" and not _taken_from_input(anchor)):
        return None
    place = inputs[-1] if anchor.op == "placeholder" else anchor
    with graph.inserting_after(place):
        return graph.call_function(getattr, (anchor, "device"))


def _taken_from_input(node: fx.Node) -> bool:
    """Whether it only takes a tensor out of an argument (a list, a dict)."""
    return all(n.op == "placeholder" or _taken_from_input(n) for n in node.all_input_nodes) and bool(
        node.all_input_nodes
    )
