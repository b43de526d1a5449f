"""The captured module put together: the graph, the model's own modules and tensors in the model's own order.

No device is written into the graph: nodes that name one follow the device of the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from refold.capture.captured import Captured, empty_captured
from refold.capture.module_calls import above
from refold.fx_private import find_tensor
from refold.graph.purity import has_effect


def assemble(
    graph: fx.Graph, model: nn.Module, constants: Mapping[str, Any], split: Mapping[str, nn.Module]
) -> Captured:
    """A GraphModule whose called modules are the model's own objects and whose containers are its own. ``split`` has
    the base-class modules to hold instead of subclasses."""
    _tidy(graph)
    called = {str(n.target) for n in graph.nodes if n.op == "call_module"}
    read = {str(n.target) for n in graph.nodes if n.op == "get_attr"}
    captured = empty_captured(type(model).__name__)
    named = read | _second_names(model, called, read)
    _add_modules(captured, model, called, named, split)
    _add_tensors(captured, model, named)
    for target in sorted(read & constants.keys()):
        _add_constant(captured, target, constants[target])
    captured.training = model.training
    captured.graph = graph
    return captured


def _tidy(graph: fx.Graph) -> None:
    """Drop what is not read any more and put every get_attr right before its first use, where re-tracing puts it."""
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op not in ("placeholder", "output") and not has_effect(node):
            graph.erase_node(node)
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.find_nodes(op="get_attr")):
        first = min(node.users, key=lambda user: order[user])
        if first is not node.next:
            first.prepend(node)


def _add_modules(
    captured: Captured, model: nn.Module, called: set[str], read: set[str], split: Mapping[str, nn.Module]
) -> None:
    """The called modules themselves, and fresh containers above them, in the order the model has them."""
    containers = {prefix for path in called | read for prefix in above(path)}
    for path, module in model.named_modules(remove_duplicate=False):
        if path in called:
            parent, name = _parent(captured, path)
            parent.add_module(name, split.get(path, module))
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
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tensors = parameters | dict(model.named_buffers(remove_duplicate=False))
    for name in [n for n in tensors if n in read and find_tensor(captured, n) is None]:
        parent, last = _parent(captured, name)
        if name in parameters:
            parent.register_parameter(last, parameters[name])
        else:
            parent.register_buffer(last, tensors[name], persistent=name in persistent)


def _add_constant(captured: Captured, target: str, value: Any) -> None:
    parent, name = _parent(captured, target)
    if isinstance(value, torch.Tensor):
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


def follow_input_device(graph: fx.Graph) -> int:
    """Let every node that names a device follow the first tensor the graph is given; returns how many did."""
    called = [node for node in graph.nodes if node.op == "call_function"]
    named = [n for n in called if any(isinstance(a, torch.device) for a in tree_leaves((n.args, n.kwargs)))]
    device = _device_node(graph) if named else None
    if device is None:
        return 0
    for node in named:
        node.args, node.kwargs = map_aggregate(
            (node.args, node.kwargs), lambda a: device if isinstance(a, torch.device) else a
        )
    return len(named)


def _device_node(graph: fx.Graph) -> fx.Node | None:
    """A node for the device of the first input, or of the first parameter where no input is a tensor."""
    tensors = (n for n in graph.nodes if n.op != "call_module" and isinstance(n.meta.get("val"), torch.Tensor))
    anchor = next(tensors, None)
    if anchor is None or (anchor.op == "call_function" and not _is_taken_from_input(anchor)):
        return None
    inputs = list(graph.find_nodes(op="placeholder"))
    with graph.inserting_after(inputs[-1] if anchor.op == "placeholder" else anchor):
        return graph.call_function(getattr, (anchor, "device"))


def _is_taken_from_input(node: fx.Node) -> bool:
    """Whether it only takes a tensor out of an argument (a list, a dict)."""
    sources = node.all_input_nodes
    return bool(sources) and all(n.op == "placeholder" or _is_taken_from_input(n) for n in sources)
