"""Putting the captured module together: the graph, the model's own modules and tensors in the model's own order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from refold.capturing.effects import has_effect
from refold.capturing.module import Captured, empty_captured
from refold.capturing.raising import above


def assemble(
    graph: fx.Graph, model: nn.Module, constants: Mapping[str, Any], twins: Mapping[str, nn.Module]
) -> Captured:
    """A GraphModule whose called modules are the model's own objects and whose containers are its own."""
    _tidy(graph)
    called = {str(n.target) for n in graph.nodes if n.op == "call_module"}
    read = {str(n.target) for n in graph.nodes if n.op == "get_attr"}
    captured = empty_captured(type(model).__name__)
    named = read | _second_names(model, called, read)
    _add_modules(captured, model, called, named, twins)
    _add_tensors(captured, model, named)
    for target in sorted(read & constants.keys()):
        _add_constant(captured, target, constants[target])
    captured.training = model.training
    captured.graph = graph
    return captured


def _tidy(graph: fx.Graph) -> None:
    """Drop what nobody reads any more and put every get_attr right before its first use, where re-tracing puts it."""
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op not in ("placeholder", "output") and not has_effect(node):
            graph.erase_node(node)
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.find_nodes(op="get_attr")):
        first = min(node.users, key=lambda user: order[user])
        if first is not node.next:
            first.prepend(node)


def _add_modules(
    captured: Captured, model: nn.Module, called: set[str], read: set[str], twins: Mapping[str, nn.Module]
) -> None:
    """The called modules themselves, and fresh containers above them, in the order the model has them."""
    containers = {prefix for path in called | read for prefix in above(path)}
    for path, module in model.named_modules(remove_duplicate=False):
        if path in called:
            parent, name = _parent(captured, path)
            parent.add_module(name, twins.get(path, module))
        elif path in containers:
            _parent(captured, f"{path}.")


def _second_names(model: nn.Module, called: set[str], read: set[str]) -> set[str]:
    """Other names of parameters that the graph reads: the model's checkpoints hold them too."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    there = {name for name in tensors if name in read or not called.isdisjoint(above(name))}
    kept = {id(tensors[name]) for name in there}
    return {name for name, parameter in tensors.items() if name not in there and id(parameter) in kept}


def _add_tensors(captured: Captured, model: nn.Module, read: set[str]) -> None:
    persistent = set(model.state_dict(keep_vars=True))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in read:
            parent, last = _parent(captured, name)
            if last not in dict(parent.named_parameters(recurse=False, remove_duplicate=False)):
                parent.register_parameter(last, parameter)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in read:
            parent, last = _parent(captured, name)
            if last not in dict(parent.named_buffers(recurse=False, remove_duplicate=False)):
                parent.register_buffer(last, buffer, persistent=name in persistent)


def _add_constant(captured: Captured, target: str, value: Any) -> None:
    parent, name = _parent(captured, target)
    if isinstance(value, nn.Module):
        parent.add_module(name, value)
    elif isinstance(value, torch.Tensor):
        parent.register_buffer(name, value.detach(), persistent=False)
    else:
        setattr(parent, name, value)


def _parent(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that holds ``path``, made of fresh containers where there is none yet, and the last name."""
    *prefix, last = path.split(".")
    for name in prefix:
        try:
            root = root.get_submodule(name)
        except AttributeError:
            root.add_module(name, child := nn.Module())
            child.training = root.training
            root = child
    return root, last
